"""Energy of tasks: choice and control of clocks, and energy accounting."""
