"""``python -m tests.benchmarks.scaling``: what it adds up, and that the page has what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import scaling
from tests.benchmarks.scaling import Layout, Links, Model, check_rows, rows, step_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
LINKS = Links()
SMALL = Model(2, 1_000_000, {"bf16": 300.0, "current": 150.0}, rest_us=50.0)


def test_the_page_has_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main([]) == 0
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in PAGE.read_text(encoding="utf-8")


def test_two_gpus_are_met_within_15_percent() -> None:
    ratios = [float(row[-1]) for row in check_rows(LINKS)]
    assert len(ratios) == 3
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios)


def test_one_gpu_computes_and_steps() -> None:
    step = step_of(SMALL, "current", Layout(1), LINKS)
    assert step == (350.0, 0.0, 0.0, pytest.approx(2 * 3226 / 504))


def test_a_ring_moves_all_but_its_own_part() -> None:
    gather = LINKS.ring(460e6, 2)
    assert gather.us == pytest.approx(8.4 + 3.4 + 1000)
    assert gather.lost_us == pytest.approx(0.89 * 1000 + 0.25 * 11.8)


def test_a_ring_over_hosts_takes_the_slower_link_and_waits_for_its_steps() -> None:
    slow = Links(net_gbs=1.0)
    assert slow.ring(8e6, 16).us == pytest.approx(8.4 + 2 * 14 + 13 * 3.4 + 500)
    assert slow.ring(8e6, 16).lost_us < slow.ring(8e6, 16).us * 0.3
    assert LINKS.ring(0, 1024).us > 10 * LINKS.ring(0, 64).us


def test_a_sum_over_hosts_goes_twice_over_the_network() -> None:
    assert LINKS.all_reduce(50e6, 1) == (0.0, 0.0)
    assert LINKS.all_reduce(50e6, 2).us == pytest.approx(8.4 + 2 * 14 + 1000)
    assert LINKS.all_reduce(0, 128).us == pytest.approx(8.4 + 2 * 7 * 14)  # a tree


def test_codes_are_gathered_for_half_the_bytes() -> None:
    free = Links(base_us=0.0, host_step_us=0.0, share=1.0, copy_tbs=1e9)
    ones = Model(1, 230_000_000, {"bf16": 1e6, "current": 1e6})
    bf16, current = (step_of(ones, recipe, Layout(2), free).exposed for recipe in ones.layer_us)
    assert bf16 == pytest.approx(3000)  # two gathers and a sum, 2 bytes each, half of which travel
    assert current == pytest.approx(2000)


def test_what_products_do_not_hide_is_waited_for() -> None:
    busy = step_of(SMALL, "bf16", Layout(2), Links(host_gbs=0.001, share=0.0, waiting_share=0.0))
    hidden = step_of(SMALL, "bf16", Layout(2), Links(share=0.0, waiting_share=0.0))
    assert hidden.exposed == 0
    assert busy.exposed == pytest.approx(2 * 3 * (1e6 + 11.8) - 2 * 300)


def test_each_layout_has_all_its_gpus() -> None:
    for name, layout in scaling.LAYOUTS.items():
        assert name.startswith(f"{layout.shards * layout.replicas:,}, ")
    assert len(rows(LINKS)) == len(scaling.LAYOUTS)
