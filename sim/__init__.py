"""A mesh in simulated time: the product's own scheduler, engines and stores, on modelled devices and networks."""
