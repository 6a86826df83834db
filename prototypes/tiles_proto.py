import sys, torch, thunder, warnings, time
warnings.simplefilter("ignore")
torch.set_num_threads(1)
from thunder_mem import MemEfficient
from thunder_mem.tiling.leaves import read_program
from thunder_mem.tiling.region import amplifying_products, Refused
from thunder_mem.tiling.stretch import grow_stretch
from thunder_mem.tiling.tile_build import build_tiles
from thunder_mem.tiling.splice import splice
from thunder_mem.chunk_loop.symbols import check_autograd
from thunder_mem.transforms import mem_efficient as me
from thunder_mem.frontend.checkpoint_tags import CHECKPOINTED
orig=me.chunk_trace
ROWS=None
def tile(trace, executors, accumulate=None):
    tried=set(); k=0
    while True:
        p=read_program(trace)
        for leaf, rows in amplifying_products(p,1.5,1):
            key=leaf.outputs[0].name
            if key in tried: continue
            tried.add(key)
            try:
                s=grow_stretch(p,leaf,rows)
                inner=sum(o.numel*o.dtype.bytes for m in s.region.members if m.is_product for o in m.outputs)//s.region.n
                if inner < 1.5*s.crossing_bytes: print("no gain", leaf.index); continue
                loop=build_tiles(s.region,ROWS,accumulate,executors,f"tiles{k}")
                check_autograd(loop)
                trace,gone=splice(p.trace,s.region,loop); k+=1
                print("TILED", leaf.index, loop, s.crossing_bytes, inner, loop.plan.forward_block_bytes, loop.plan.backward_block_bytes, [b.pairs for b in loop.backward.values()])
                for b in trace.bound_symbols:
                    if b.sym.name=="chunk_loop" and b.args[0] is loop:
                        if any(CHECKPOINTED in (x.tags or ()) for x in gone) or any(CHECKPOINTED in par.tags for m in s.region.members for par in m.parents): b.tags.add(CHECKPOINTED)
                        print("tags", b.tags)
                break
            except Refused as e:
                print("REFUSED", leaf.index, e.leaf.name, e.reason)
        else: return trace
def hook(trace,**k):
    t,r=orig(trace,**k)
    if ROWS: t=tile(t,k['executors_list'])
    return t,r
me.chunk_trace=hook
