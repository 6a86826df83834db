import torch, thunder, warnings
warnings.simplefilter("ignore")
from benchmarks.models import gpt_module, small_llama
from thunder_mem import MemEfficient
import thunder_mem.tiling.find as find
from thunder_mem.tiling.leaves import read_program
from thunder_mem.tiling.region import amplifying_products, Refused
from thunder_mem.tiling.stretch import grow_stretch
from thunder_mem.transforms import mem_efficient as me
orig=me.chunk_trace
def hook(trace,**k):
    t,r=orig(trace,**k)
    p=read_program(t)
    print(len(p.leaves)); [print("LEAF", l.index, l.bsym) for l in p.leaves[148:156]]
    for leaf, rows in amplifying_products(p,1.0,1):
        try:
            s=grow_stretch(p,leaf,rows)
            print(leaf.index, leaf.label, leaf.outputs[0].shape, 'members', [ (m.index,m.name) for m in s.region.members], 'in', [(v.proxy.name,tuple(v.proxy.shape)) for v in s.region.inputs], 'out', [(v.proxy.name,tuple(v.proxy.shape)) for v in s.region.outputs], s.crossing_bytes)
        except Refused as e:
            print(leaf.index, 'REFUSED', e.leaf.name, e.reason)
    return t,r
me.chunk_trace=hook
cfg=small_llama(vocab=512,layers=2,tokens=256,width=64,heads=4,mlp_width=172)
m=gpt_module(cfg,True,True,"cpu",torch.bfloat16)
j=thunder.jit(m,transforms=[MemEfficient(strict=True)])
t=torch.zeros(1,256,dtype=torch.long)
from thunder_mem.prediction.predict import compiled_entry
try: compiled_entry(j,(t,t),{},call=True)
except Exception as e: print(repr(e)[:300])
