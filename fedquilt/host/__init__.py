"""The machine: disk, memory, threads, logs and HTTP."""
