exec(open('/tmp/me/proto.py').read())
from benchmarks.models import gpt_module, small_llama
from thunder_mem.prediction.measure import measure_peak
from thunder_mem.prediction.predict import predict
def go(rows, ck, dtype):
    global ROWS; ROWS=rows
    torch.manual_seed(0)
    m=gpt_module(small_llama(vocab=512,layers=2,tokens=1024,width=128,heads=4,mlp_width=512),ck,True,"cpu",dtype)
    g=torch.Generator().manual_seed(1)
    t=torch.randint(0,512,(1,1024),generator=g)
    j=thunder.jit(m,transforms=[MemEfficient(strict=True)])
    for p in m.parameters(): p.grad=torch.zeros_like(p)
    def step(): j(t,t).backward()
    step()
    for p in m.parameters(): p.grad.zero_()
    step()
    grads=[p.grad.double().clone() for p in m.parameters()]
    peak=measure_peak(step)
    return peak, grads
ref=go(None,True,torch.float64)[1]
for dtype in (torch.float32, torch.bfloat16):
    a=go(None,True,dtype); b=go(128,True,dtype)
    err=lambda g: max(((x-y).norm()/y.norm().clamp_min(1e-30)).item() for x,y in zip(g,ref))
    print(dtype, a[0]/2**20, b[0]/2**20, "err", err(a[1]), err(b[1]))
