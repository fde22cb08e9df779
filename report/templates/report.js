"use strict";
const box = document.getElementById("find");
const groups = Array.from(document.querySelectorAll(".adapters details"));
const rows = groups.map((group) => Array.from(group.querySelectorAll("tbody tr")));
const names = rows.map((list) => list.map((row) => row.cells[0].textContent.toLowerCase()));
box.addEventListener("input", () => {
  const wanted = box.value.trim().toLowerCase();
  groups.forEach((group, g) => {
    let hits = 0;
    rows[g].forEach((row, r) => {
      const hit = names[g][r].includes(wanted);
      row.hidden = !hit;
      hits += hit;
    });
    group.hidden = hits === 0;
    group.open = wanted !== "" && hits > 0;
  });
});
