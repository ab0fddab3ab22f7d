"""The tools of experiments: small nets, a segmented engine, a bench, and separate processes.

In comes a Bench (device, model, report), out come rows, figures and a chart. Begin with `bench`, then `rows`.
"""
