"""The worker process, its client and the store of runs. Only the worker imports the engine, and late."""
