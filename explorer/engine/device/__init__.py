"""CPU and CUDA behind one interface: allocators, clocks, memory limits, child processes.

In comes a torch.device. Out come recorders of allocator events, clocks, limits and the description of the machine.
Read device.py first: its classes `CpuDevice` and `CudaDevice` choose everything else.
"""
