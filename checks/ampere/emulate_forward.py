import sys, time; sys.path.insert(0, "checks/ampere")
import numpy as np
from emulate_ptx import Program, GLOBAL
import ml_dtypes
path, H, causal, rows, T, S, N, K = sys.argv[1], int(sys.argv[2]), sys.argv[3]=="c", *map(int, sys.argv[4:9])
nan = len(sys.argv) > 9
text = open(path).read()
rng = np.random.default_rng(0)
bf = ml_dtypes.bfloat16
q, k, v = (rng.normal(size=s).astype(bf) for s in ((1,T,N,H),(1,S,K,H),(1,S,K,H)))
if nan: v[0, 150, 0, 3] = np.nan
tiles = -(-T//rows)
out = np.full((1,T,N,H), 7, bf); lse = np.full((1,N,tiles*rows), 7, np.float32)
memory, at = bytearray(), []
guard = bytes([0xAB])*256
for x in (q,k,v,out,lse):
    memory += guard; at.append(len(memory)); memory += x.tobytes(); memory += bytes(-len(memory) % 256)
memory += guard
memory = np.frombuffer(memory, np.uint8).copy(); before = memory.copy()
program = Program(text)
print(len(program.params), program.params)
# params: out of order? scratch first
order = [4,0,1,2,3]; params = [GLOBAL + at[i] for i in order]
t = time.time(); steps = 0
for b in range(N*tiles):
    steps += program.run(memory, params, b).steps
print("steps", steps, time.time()-t)
out = memory[at[3]:at[3]+out.nbytes].view(bf).reshape(out.shape).astype(np.float64)
lse = memory[at[4]:at[4]+lse.nbytes].view(np.float32).reshape(lse.shape)
same = before == memory; same[at[3]:at[3]+out.size*2] = True; same[at[4]:at[4]+lse.nbytes] = True
assert same.all(), "wrote elsewhere"
x = [y.astype(np.float64) for y in (q,k,v)]
for n in range(N):
    s = x[0][0,:,n]@x[1][0,:,n*K//N].T*H**-0.5
    if causal: s = np.where(np.tril(np.ones(s.shape)), s, -np.inf)
    m = s.max(1, keepdims=True); p = np.exp(s-m); L = np.log(p.sum(1))+m[:,0]
    P = p/p.sum(1, keepdims=True)
    vv = x[2][0,:,n*K//N]; 
    o = P @ np.where(np.isnan(vv), 0, vv)
    sees = (P[:, 150] > 0) if nan else np.zeros(T, bool)
    d = np.abs(out[0,:,n]-o); 
    if nan:
        assert np.isnan(out[0,sees,n,3]).all(); d[sees,3] = 0
    print("head", n, "max error out", d.max(), "rms", np.sqrt((d**2).mean()), "lse", np.abs(lse[0,n,:T]-L).max())
