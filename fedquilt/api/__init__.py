"""Public Python interface. `fedquilt` imports these modules on the first use of a public name."""
