"""Requests come in, records of runs go out and into the store. Only the worker imports the engine. Read client.py."""
