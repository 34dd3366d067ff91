"""The trained model: Megatron-Core, one rank a process, on GPUs or on CPUs."""
