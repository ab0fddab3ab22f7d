"""A step that several ranks share: split by torch's FSDP2, DDP and tensor parallelism, predicted and run.

In come a RunSpec with `ranks` and a process group. Out come one measurement a rank (`RecordedRanks`) and verdicts on
sharded steps. The ranks of predict.py exist one after another in one process; those of real.py are processes of
torchrun. Both split the model by split.py, which is the file to read first.
"""
