"""The forecast of a policy: its effect on a measured step, before the policy runs.

In comes one run with its timeline (record/measurement.py), the graph of the model, and a policy. Out comes a forecast:
peak, saved bytes, FLOPs and step time. The rooms `planners`, `why` and the page read it. Begin with forecaster.py.

The rules of checkpoint memory stand here once; the code cites them by number. calls.py applies them to one call, and
changes.py to one policy, tensor by tensor. planners/linear_memory.py applies them to all policies, as rows of a
program.

1. Saved tensors. A tensor that a call saves is freed when forward of the call ends, and restored when its backward
   begins. The last saved tensor stays until an operator has used it. A segment frees block by block, and restores all
   blocks at once. Of several calls that free a tensor, the first decides when it leaves, the innermost when it is back.
   An output that no other block saves is freed when the last block that uses it returns. If a call around it returns it
   later, it is freed when the code around that call returns. Autocast's copy of a weight is freed when forward ends.
2. Inputs. The checkpoint of a call keeps its inputs until backward of the call has ended, although another unit would
   free them. A call inside another call keeps its inputs from the rerun of the outer call until its own rerun.
   A tensor that comes inside a tuple or object is kept by that object: the tensor of forward stays until backward of
   the inner call has ended, beside the one that the outer rerun makes.
3. Generator. Each call keeps the state of torch's CPU generator from its forward until its backward has ended. During
   the rerun the checkpoint keeps the present state as well. An input that the call saves keeps the state through the
   last operator of its backward.
4. Rerun. A rerun holds the temporary tensors of forward a second time, up to its last saved tensor (early stop).
5. Statistics. A rerun updates copies of running statistics. The copies of a norm live until its backward.
6. Kept operators (save_ops). The results of the named operators stay from forward on, whether backward needs them or
   not. The rerun reads the results and allocates nothing for these operators. A result that the rerun reads lives as in
   forward. A result after the point where the rerun stops stays until backward of the call has ended.
7. Nesting. The rerun of an outer unit frees what units inside save, and keeps their inputs and generator states. It
   stops where its last inner unit is entered, if that unit saves the last tensor.

Source: torch.utils.checkpoint, its note on nesting and early stop, and _CachedTorchDispatchMode for rule 6.
"""
