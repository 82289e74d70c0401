"""A loop without a bound, with a fixed number of kept carries: `while_loop`."""
