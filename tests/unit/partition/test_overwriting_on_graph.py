"""Gradients over operands in a graph: what dies is overwritten, and what is read later stays."""

from dataclasses import replace

from thunder_mem.fusion.contraction import FusionCapabilities
from thunder_mem.memory.graph import Op, Storage, make_graph
from thunder_mem.memory.live_ranges import price_order
from thunder_mem.partition.evaluation import evaluate
from thunder_mem.partition.overwriting_on_graph import Overwritable

SIZE = 1024


def program(backwards=1, read_last=False):
    """x -> loss, and a chain of gradients: of x, then of that gradient, each over what it reads last.

    Returns:
        the graph, its facts, and the gradient that each operation of the backward may write over its operand.
    """
    ops = [Op(0, "x", (0,), (), (1,)), Op(1, "loss", (1,), (), (2,))]
    storages = [Storage(0, 4, held=True), Storage(1, SIZE), Storage(2, 4)]
    operands = [(), (0,)]
    over = {}
    for k in range(backwards):
        op, operand, gradient = len(ops), 1 if not k else 2 + k, 3 + k
        reads = (operand,) if k else (operand, 2)  # the first gradient is that of the loss
        ops.append(Op(op, "gradient", reads, (), (gradient,), 0, True))
        storages.append(Storage(gradient, SIZE))
        operands.append((op - 1,) if k else (0, 1))
        over[op] = Overwritable({operand: gradient}, True)
    last = 2 + backwards
    ops.append(Op(len(ops), "last", (1, last) if read_last else (last,), (), (last + 1,), 0, True))
    storages.append(Storage(last + 1, 4))
    operands.append((0, len(ops) - 2) if read_last else (len(ops) - 2,))
    edges = [(p, op) for op, of_op in enumerate(operands) for p in of_op]
    nothing = (0,) * len(ops)
    fuse = FusionCapabilities(nothing, nothing, 0, (False,) * len(ops), tuple(operands))
    return make_graph(ops, storages, edges, {2, last + 1}), fuse, over


def peak(graph, fuse, over, rebuilt=frozenset()):
    return evaluate(graph, fuse, rebuilt, "source", over=over).peak_bytes


def test_a_gradient_over_its_operand_takes_no_memory():
    graph, fuse, over = program()
    assert peak(graph, fuse, {}) == price_order(graph).peak_bytes
    assert peak(graph, fuse, {}) - peak(graph, fuse, over) == SIZE - 4  # then the last two results are the peak


def test_a_chain_of_gradients_has_the_memory_of_the_first_operand():
    graph, fuse, over = program(backwards=4)
    assert peak(graph, fuse, over) < 2 * SIZE <= peak(graph, fuse, {})


def test_an_operand_that_is_read_later_stays():
    graph, fuse, over = program(read_last=True)
    assert peak(graph, fuse, over) == peak(graph, fuse, {})


def test_an_operand_stays_for_a_reader_that_may_run_later():
    graph, fuse, over = program()
    later = [replace(op, index=op.index + 1) for op in graph.ops[2:]]
    ops = [*graph.ops[:2], Op(2, "beside", (1,), (), (5,), 0, True), *later]
    operands = [*fuse.operands[:2], (0,), (0, 1), (3,)]
    storages = [*graph.storages, Storage(5, 4)]

    def peaks(*edges):
        nothing = (0,) * len(ops)
        facts = replace(fuse, takes=nothing, required=nothing, cheap=(False,) * len(ops), operands=tuple(operands))
        data = [(p, op) for op, of_op in enumerate(operands) for p in of_op]
        new = make_graph(ops, storages, [*data, *edges], graph.outputs)
        return [peak(new, facts, found) for found in ({}, {3: over[2]})]

    plain, with_over = peaks()
    assert with_over == plain
    plain, with_over = peaks((2, 3))  # now it runs before
    assert with_over < plain


def test_an_operand_that_the_forward_made_stays_unless_the_backward_makes_it_again():
    graph, fuse, over = program()
    own = {op: Overwritable(may.gradients, from_forward=False) for op, may in over.items()}
    again = frozenset({1})
    assert peak(graph, fuse, own) == peak(graph, fuse, {})
    assert peak(graph, fuse, own, again) < peak(graph, fuse, {}, again)


def test_a_returned_operand_stays():
    graph, fuse, over = program()
    returned = make_graph(graph.ops, graph.storages, (), {1, *graph.outputs})
    assert peak(returned, fuse, over) == peak(returned, fuse, {})
