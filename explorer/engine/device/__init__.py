"""CPU and CUDA behind one interface: allocators, clocks, limits. Chosen once, at the edge."""
