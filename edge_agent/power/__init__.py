"""Energy of tasks: the choice of clocks, their control, and the accounting of joules."""
