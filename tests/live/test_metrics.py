"""Reading /metrics of whatever release."""

from __future__ import annotations

import pytest

from packer.io.web import Address
from packer.kv_shape import KvShape
from packer.live.fleet_file import Host, StepLimits
from packer.live.host import RunningServer
from packer.live.metrics import MAX_KEPT, MAX_PAGE_BYTES, KvCache, kept, page_of, summarise, thinned
from tests.live.stand_in import StandIn

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 20.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="base"} 42.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.48
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="base"} 3.0
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="8",running_lora_adapters="a0",waiting_lora_adapters=""} 1.79
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",num_gpu_blocks="128",engine="0"} 1.0
"""


def test_the_figures_of_a_page_of_0_32() -> None:
    """Gauges, counters and what hides in labels."""
    page = page_of(PAGE, 1.5)
    assert page.figures == {"running": 20.0, "waiting": 42.0, "kv_usage": 0.48, "preemptions": 3.0}
    assert (page.time_s, page.kv_cache, page.max_loras) == (1.5, KvCache(128, 32, 1, None), 8)
    assert page.in_flight == {"a0"}


def test_older_names_are_known() -> None:
    """The KV gauge of releases before 0.10 is read as the same figure."""
    old = PAGE.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    assert page_of(old).figures["kv_usage"] == 0.48


def test_engines_are_added() -> None:
    """Data-parallel engines report apart; the server's figure is their sum."""
    more = PAGE + 'vllm:num_requests_running{engine="1",model_name="base"} 5.0\n'
    assert page_of(more.replace("# TYPE vllm:num_requests_running gauge\n", "")).figures["running"] == 25.0


@pytest.mark.parametrize("labels", ["", '{engine="0"}', '{engine="0",a="} 7 # {\\"b"}'])
@pytest.mark.parametrize("time", ["", " 1700000000123", " 1700000000.123", " 1.7e9"])
@pytest.mark.parametrize("exemplar", ["", ' # {trace_id="x"} 0.5 1700000000.1', " # {} 0.5"])
def test_times_and_exemplars_of_open_metrics_are_passed_over(labels: str, time: str, exemplar: str) -> None:
    """The figure is the sample's value, whatever time and exemplar follow it."""
    line = f"vllm:prompt_tokens_total{labels} 100{time}{exemplar}"
    assert page_of(line).figures == {"prompt": 100.0}


@pytest.mark.parametrize("text", ["", "no metrics here", PAGE.replace("vllm:", "new:"), "vllm:x{ 1\n\x00"])
def test_a_page_without_our_figures_is_no_error(text: str) -> None:
    """Renamed, empty or damaged: every figure is missing, nothing raises."""
    page = page_of(text)
    assert "running" not in page.figures
    assert page.kv_cache is None


def test_a_run_is_means_of_gauges_and_growth_of_counters() -> None:
    """The look before the run starts the counters and is no part of the means; lost pages are passed over."""
    before = PAGE.replace("} 20.0", "} 0.0").replace("} 3.0", "} 1.0")
    summary = summarise([(0.0, before), (1.0, PAGE), (2.0, ""), (3.0, PAGE.replace("} 20.0", "} 10.0"))])
    assert summary.mean_running == 15.0
    assert summary.preemptions == 2.0
    assert summary.samples == 3


@pytest.mark.parametrize(
    ("shape", "said", "tokens"),
    [
        (None, None, 7000 * 16),
        (None, 111_126, 7000 * 16),  # 7,001 blocks / 63 for a request of 1,000 tokens
        (KvShape(1031, 6 / 7), None, 1000 * 16),
        (KvShape(1031, 0.857), 20_000, 1000 * 16),
        (KvShape(request_tokens=2744.0), 50_000, 7000 * 16),
        (None, 20_000, 20_000),
    ],
)
def test_a_group_of_layers_has_blocks_of_its_own(shape: KvShape | None, said: int | None, tokens: int) -> None:
    """A token of Gemma 3 takes a place in the blocks of seven groups; where the profile does not know of groups, vLLM's
    own count is the capacity."""
    label = "" if said is None else f'kv_cache_size_tokens="{said}",'
    cache = page_of(f'vllm:cache_config_info{{block_size="16",{label}num_gpu_blocks="7001"}} 1').kv_cache
    assert cache is not None
    assert cache.capacity(shape, 1000) == tokens


def test_data_parallel_engines_share_their_figures() -> None:
    """The blocks are all engines', the tokens one's, and the share of the KV cache in use is their mean."""
    sizes = 'vllm:cache_config_info{block_size="16",engine="%d",kv_cache_size_tokens="160",num_gpu_blocks="22"} 1'
    page = page_of("\n".join(f'{sizes % k}\nvllm:kv_cache_usage_perc{{engine="{k}"}} {k}' for k in (0, 1)))
    assert page.figures == {"kv_usage": 0.5}
    assert page.kv_cache == KvCache(22, 16, 2, 160)
    assert page.kv_cache.capacity(None, 160) == 2 * page.kv_cache.said == 320


def test_no_page_at_all() -> None:
    """A server without /metrics gives a summary in which all is missing."""
    summary = summarise([(0.0, ""), (1.0, "")])
    assert summary.samples == 0
    assert summary.mean_running is None


@pytest.mark.parametrize("blocks", ["²", "9" * 5000, "-3", "1e3", ""])
def test_a_count_of_blocks_that_is_no_number_is_missing(blocks: str) -> None:
    """Signs that Python takes for digits, and numbers that it refuses to read."""
    assert page_of(PAGE.replace('"128"', f'"{blocks}"')).kv_cache is None


def test_a_damaged_line_costs_that_line() -> None:
    """What stands before and after it is read."""
    lines = PAGE.splitlines()
    lines[2] = "vllm:num_requests_running{engine= 20"
    page = page_of("\n".join(["\x00\xff{{{", *lines]))
    assert "running" not in page.figures
    assert page.figures == {"waiting": 42.0, "kv_usage": 0.48, "preemptions": 3.0}
    assert page.kv_cache == KvCache(128, 32, 1, None)


@pytest.mark.parametrize("value", ["nan", "+Inf", "1e999", "-1", "1e300"])
def test_a_figure_that_no_server_has_is_missing(value: str) -> None:
    """It would make the mean of a run as useless."""
    assert page_of(PAGE.replace("} 20.0", f"}} {value}")).figures.keys() == {"waiting", "kv_usage", "preemptions"}


@pytest.mark.parametrize(
    ("page", "busy"),
    [
        (PAGE.replace("} 20.0", "} 0").replace("} 42.0", "} 0"), frozenset()),
        (PAGE.replace("vllm:num_requests_running{", "vllm:running{"), None),
        (PAGE.replace("lora_requests_info{", "lora_info{"), None),
        (PAGE.replace('waiting_lora_adapters=""', 'waiting_lora_adapters="a0"'), None),
        (PAGE.replace("} 42.0", "} 0").replace('adapters=""', 'adapters="a0"'), {"a0"}),
        (PAGE.replace('"a0"', r'"a\\b,c \"d\""'), {"a\\b", 'c "d"'}),
    ],
)
def test_an_adapter_is_idle_only_where_the_page_says_so(page: str, busy: frozenset[str] | None) -> None:
    """It is unloaded then: neither a page without the figures, nor one that does not name the adapters of requests
    that wait, must pass for one of an idle server."""
    assert page_of(page).in_flight == busy


def test_an_adapter_with_commas_in_its_name_is_busy() -> None:
    """vLLM joins the names of its lists by commas: such a name is not unloaded while its requests are in flight."""
    page = page_of(PAGE.replace("} 42.0", "} 0").replace('"a0"', '"b,sql, de"'))
    assert [page.busy(name) for name in ("sql, de", "b", "sql,fr", "c")] == [True, True, False, False]


def test_what_is_kept_of_a_page_is_bounded() -> None:
    """A page of millions of figures."""
    assert len(kept(PAGE * 10_000)) <= MAX_KEPT
    assert kept(PAGE).count("\n") == 4


def test_a_page_of_any_length_says_what_the_server_does_now() -> None:
    """vLLM never drops the series of a list of adapters: after an hour a page has tens of megabytes, in which the
    newest list may be anywhere."""
    line = 'vllm:lora_requests_info{{max_lora="8",running_lora_adapters="{}",waiting_lora_adapters="x"}} {}\n'
    lists = [line.format(",".join(f"adapter-{k + i}" for i in range(24)), 1e9 + k) for k in range(20_000)]
    lists[7_000] = line.format("a0", 2e9)
    text = "".join([*lists, PAGE.replace("} 1.79", "} 1.79e9")])
    assert len(text) > 2 * MAX_PAGE_BYTES
    server = StandIn()
    server.raw["/metrics"] = lambda handler: handler.wfile.write(f"HTTP/1.0 200 OK\r\n\r\n{text}".encode())
    page = page_of(RunningServer(Host(server.url, "gpu-0"), Address(server.url), StepLimits()).metrics())
    server.close()
    assert page == page_of(text)
    assert page.adapters == {"a0", "x"}


@pytest.mark.parametrize("after", ["", " 1790000000000", ' # {trace="x"} 1.0'])
@pytest.mark.parametrize("cut", range(0, len(PAGE), 37))
def test_a_thinned_page_reads_as_the_whole_one(cut: int, after: str) -> None:
    """Wherever a page is cut between two pieces, nothing that is read from it is lost, also with times and exemplars
    after the values."""
    older = PAGE.replace('"a0"', '"b"').replace("} 1.79", f"}} 1.7{after}")
    page = (older + PAGE.replace("} 1.79", f"}} 1.79{after}")).encode()
    assert page_of(thinned(thinned(page[:cut]) + page[cut:]).decode()) == page_of(page.decode())


def test_a_counter_that_falls_began_anew() -> None:
    """Growth is what was counted before and after the restart."""
    pages = [(float(k), PAGE.replace("} 3.0", f"}} {n}.0")) for k, n in enumerate((3, 7, 2, 4))]
    summary = summarise(pages)
    assert (summary.preemptions, summary.restarts) == (4 + 2 + 2, 1)
