"""A loss over a vocabulary that is split over ranks, on a trace of ranks that are not there."""

import thunder.torch as ltorch
from thunder.core import devices, dtypes, prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx, tracectx

from tests.checking.collectives import tensor
from thunder_mem.loop_body.leaves import read_program
from thunder_mem.sharding.rank_reductions import GATHERS_LAST_DIM
from thunder_mem.tiling.vocab_parallel import with_vocabulary_in_parts

ROWS, PART = 6, 8


def of_gathered_logits(fn, group):
    """The trace of a function of logits that two ranks have in parts, targets, and a vector over the vocabulary."""
    from thunder.distributed import prims as dist

    trace = TraceCtx(None)
    with tracectx(trace), langctx(Languages.TORCH):
        part, scale = tensor("part", ROWS, PART), tensor("scale", 2 * PART)
        targets = TensorProxy("targets", shape=(ROWS,), dtype=dtypes.int64, device=devices.cpu, requires_grad=False)
        trace.args = (part, targets, scale)
        logits = dist.synchronize_tensor_parallel_output(part, group, GATHERS_LAST_DIM)
        prims.python_return(fn(logits, targets, scale))
    return trace


def made(trace):
    """Names of what a trace runs, and of what is as wide as the whole vocabulary."""
    leaves = read_program(trace).leaves
    wide = [leaf.name for leaf in leaves for out in leaf.outputs if out.shape == (ROWS, 2 * PART)]
    return {leaf.name for leaf in leaves}, wide


GATHER = "synchronize_tensor_parallel_output"


def test_ranks_exchange_a_few_numbers_a_row(groups):
    trace = of_gathered_logits(lambda z, t, scale: ltorch.cross_entropy(z * scale, t), groups[0])
    assert GATHER in made(trace)[1]
    names, wide = made(with_vocabulary_in_parts(trace))
    assert {"sum_over_ranks", "log_sum_over_ranks"} <= names and not wide


def test_what_needs_all_logits_gathers_them_once_and_the_loss_does_not(groups):
    trace = of_gathered_logits(lambda z, t, _: (ltorch.cross_entropy(z, t), z.argmax(-1), z.argmin(-1)), groups[0])
    names, wide = made(with_vocabulary_in_parts(trace))
    assert "log_sum_over_ranks" in names and wide == [GATHER]


def test_logits_that_are_needed_whole_alone_stay_as_they_are(groups):
    trace = of_gathered_logits(lambda z, t, _: z.argmax(-1), groups[0])
    assert with_vocabulary_in_parts(trace) is trace


def test_what_is_cut_off_from_its_gradient_stays_so(groups):
    def fn(logits, *_):
        found = ltorch.logsumexp(logits, -1)
        found.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return found

    trace = with_vocabulary_in_parts(of_gathered_logits(fn, groups[0]))
    (found,) = trace.bound_symbols[-1].flat_proxy_args
    assert ProxyTag.DETACHED_AUTOGRAD_GRAPH in found.tags
