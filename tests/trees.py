"""A folder that looks like / of a Linux host, as far as a test writes it."""

from __future__ import annotations

from pathlib import Path


class Tree:
    """Memory is there from the start; all else is what a test adds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", "MemTotal:        2000 kB\nMemFree: 1 kB\nMemAvailable:    500 kB\nHugePages_Total: 0"
        )

    def write(self, path: str, text: object) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def files(self, folder: str, **files: object) -> None:
        for name, text in files.items():
            self.write(f"{folder}/{name}", text)

    def rapl(self, number: str, name: str, energy_uj: int, range_uj: int = 1000) -> None:
        folder = f"sys/class/powercap/intel-rapl:{number}"
        self.files(folder, name=name, energy_uj=energy_uj, max_energy_range_uj=range_uj)

    def cores(self, listed_khz: str, policy: str = "policy0") -> None:
        """One policy; it has limits, which only a policy whose cores are all off has not."""
        folder = f"sys/devices/system/cpu/cpufreq/{policy}"
        self.files(folder, scaling_available_frequencies=listed_khz, scaling_min_freq=1, scaling_max_freq=10**7)
