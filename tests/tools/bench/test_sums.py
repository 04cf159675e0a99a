"""`fedquilt bench sums`: on few entries, as it is run and printed."""

from fedquilt.tools.lab.bench import sums


def test_it_prints_what_a_sum_costs_and_that_its_bits_stay() -> None:
    result = sums.measure(entries=70_000, updates=4, moments=[(40, 32, True)])
    text = "\n".join(sums.lines(result))
    assert result["figures"]["orders_and_groups_with_other_bits"]["reached"]
    assert result["figures"]["bytes_an_entry"]["value"] == 12
    assert "ns an entry" in text
    (moments,) = result["moments"]
    assert moments["update_mb"] > 8e-6 * 40 * 32 / 2
    assert moments["sum_mb"] > 12e-6 * 32 * 33 / 2
    assert "moments of 40 examples of 32 features" in text
    assert max(map(len, text.splitlines())) <= 100
