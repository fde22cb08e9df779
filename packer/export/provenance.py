"""The mark of estimates: a file made with a profile whose errors may be large has a comment about it.

JSON holds no comments: there the profiles' labels are among the data (`args.json`, `routing.json`).
"""

from __future__ import annotations

from collections.abc import Mapping

from packer.plan import Plan


def marked(files: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """The same files; shell, YAML and nginx open with a comment for each such profile of the plan."""
    comments = "".join(f"# {line}\n" for line in estimates(plan))
    return {name: text if name.endswith(".json") else _under(comments, text) for name, text in files.items()}


def estimates(plan: Plan) -> list[str]:
    """A line for each such profile, in ASCII without control characters, so that it stays one line."""
    labels = dict.fromkeys(item.profile.label for item in plan.bins if item.profile.doubts)
    return [f"Planned with the profile {ascii(label)[1:-1]}: expect large errors." for label in labels]


def _under(comments: str, text: str) -> str:
    """The comments on top, below the line `#!` of a script."""
    first, newline, rest = text.partition("\n")
    if first.startswith("#!"):
        return f"{first}{newline}{comments}{rest}"
    return comments + text
