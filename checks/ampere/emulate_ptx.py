"""Run the PTX of a one-warpgroup kernel in NumPy: enough of PTX for memeff's Ampere kernels.

The lanes of a warp go in lock step, by the smallest program counter. Each warp runs to the next
barrier before another one runs, in the order of WARPS (environment, "0123"), so that a missing barrier
shows in one order or another. A cp.async fills its place with NaN when it begins and writes when its
group has been waited for, so that a missing wait shows.
"""
import os, re, sys
import numpy as np

GLOBAL = 1 << 20
THREADS = 128
ORDER = tuple(map(int, os.environ.get('WARPS', '0123')))  # in which warps run between barriers
U = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
S = {16: np.int16, 32: np.int32, 64: np.int64}


def f32(x): return x.view(np.float32)
def bits(x): return np.ascontiguousarray(x, np.float32).view(np.uint32)
def from_bf16(x): return (x.astype(np.uint32) << 16).view(np.float32)
def to_bf16(x):
    u = bits(x).astype(np.uint64)
    r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), r)


class Program:
    def __init__(self, text):
        self.code, self.labels, self.params = [], {}, []
        body = text[text.index(".entry"):]
        body = body[: body.index(".section")] if ".section" in body else body
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            if m := re.match(r"\.param .*?(\w+),?$", line):
                self.params.append(m[1]); continue
            if not line or line.startswith((".", "{ ", ")")) or line in "{}": continue
            if m := re.match(r"(\$\w+):$", line):
                self.labels[m[1]] = len(self.code); continue
            if line.endswith(";"):
                m = re.match(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*);$", line)
                assert m, line
                ops = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]|]+", m[4])
                self.code.append((m[2], m[1] == "!", m[3], ops))
    def run(self, memory, arguments, block, shared_bytes=200_000):
        return Machine(self, memory, arguments, block, shared_bytes)


class Machine:
    def __init__(self, program, memory, arguments, block, shared_bytes):
        self.reg, self.memory, self.block = {}, memory, block
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.arguments = dict(zip(program.params, arguments))
        self.open, self.groups = [[] for _ in range(4)], [[] for _ in range(4)]
        self.pc = np.zeros(THREADS, np.int64)
        self.steps = 0
        n = len(program.code)
        warps = np.arange(THREADS) // 32
        while (self.pc < n).any():  # each warp runs to the next barrier before the other warps do
            places = set()
            for warp in ORDER:
                stopped = self.run_warp(program, warp, warps == warp, n)
                places.add(stopped)
            assert len(places) == 1, f"warps wait at different barriers: {places}"
            self.pc += 1  # behind the barrier, or behind the end

    def run_warp(self, program, warp, lanes, n):
        """Run a warp to a barrier, at which all its lanes are. Return that place."""
        self.warp = warp
        while True:
            at = int(self.pc[lanes].min())
            mask = lanes & (self.pc == at)
            if at >= n: return n
            guard, negated, name, ops = program.code[at]
            if name.startswith("bar"):
                assert mask[lanes].all(), "a barrier in divergent code"
                return at
            active = mask
            if guard:
                p = self.reg[guard]
                active = mask & (~p if negated else p)
            self.pc[mask] = at + 1
            self.steps += 1
            if name == "ret": self.pc[active] = n; continue
            if name in ("bra", "bra.uni"): self.pc[active] = program.labels[ops[0]]; continue
            if active.any(): self.do(name, ops, active)

    def value(self, op, width, signed=False):
        kind = (S if signed else U)[width]
        if op.startswith("%r") or op.startswith("%rs"):
            x = self.reg[op]
            return x.astype(U[width]).view(kind) if x.dtype != U[width] else x.view(kind)
        if op == "%tid.x": return np.arange(THREADS).astype(kind)
        if op == "%ctaid.x": return np.full(THREADS, self.block, kind)
        if op.startswith("0f"): return np.full(THREADS, int(op[2:], 16), U[32])
        if op == "__dynamic_shmem__0": return np.zeros(THREADS, kind)
        return np.full(THREADS, int(op, 0) & ((1 << width) - 1), U[width]).view(kind)

    def set(self, op, x, active):
        x = np.ascontiguousarray(x)
        if x.dtype.kind in "if": x = x.view(U[8 * x.itemsize])
        old = self.reg.get(op)
        self.reg[op] = x.copy() if old is None or active.all() or old.dtype != x.dtype else np.where(active, x, old)

    def address(self, op):
        base, _, offset = op[1:-1].partition("+")
        x = self.value(base.strip(), 64).astype(np.int64)
        return x + int(offset or 0)

    def place(self, address, size):
        where = address[:, None] + np.arange(size)
        is_global = address >= GLOBAL
        return where, is_global

    def load(self, address, size, active):
        where = address[active][:, None] + np.arange(size)
        out = np.zeros((THREADS, size), np.uint8)
        if not len(where): return out
        if (where >= GLOBAL).all(): out[active] = self.memory[where - GLOBAL]
        else:
            assert (where < GLOBAL).all()
            out[active] = self.shared[where]
        return out

    def store(self, address, data, active):
        where = address[active][:, None] + np.arange(data.shape[1])
        if (where >= GLOBAL).all(): self.memory[where - GLOBAL] = data[active]
        else: self.shared[where] = data[active]

    def do(self, name, ops, active):
        parts = name.split(".")
        op, kind = parts[0], parts[-1]
        width = int(re.sub(r"\D", "", kind) or 0) if re.match(r"[bsuf]\d+$", kind) else 0
        signed = kind.startswith("s")
        with np.errstate(all="ignore"):
            if name.startswith("ld.param"):
                return self.set(ops[0], np.full(THREADS, self.arguments[ops[1][1:-1]], np.uint64), active)
            if op == "cvta": return self.set(ops[0], self.value(ops[1], 64), active)
            if op in ("bar", "fence"): return
            if op == "elect": return self.set(ops[1], np.arange(THREADS) % 32 == 0, active)
            if name.startswith("stmatrix"): return self.stmatrix(ops, "trans" in parts, active)
            if name == "cp.async.commit_group": self.groups[self.warp].append(self.open[self.warp]); self.open[self.warp] = []; return
            if name.startswith("cp.async.wait_group"):
                while len(self.groups[self.warp]) > int(ops[0]):
                    for to, source, size in self.groups[self.warp].pop(0): self.finish(to, source, size)
                return
            if name.startswith("cp.async.cg"):
                to, source = self.address(ops[0]), self.address(ops[1])
                size = self.value(ops[3], 32) if len(ops) > 3 else np.full(THREADS, 16)
                self.store(to, np.full((THREADS, 16), 0xFF, np.uint8), active)
                self.open[self.warp].append((to[active], source[active], size[active])); return
            if name.startswith("ldmatrix"): return self.ldmatrix(ops, "trans" in parts, active)
            if op == "mma": return self.mma(ops, active)
            if op == "shfl":
                x = self.value(ops[1], 32); lane = np.arange(THREADS) ^ int(ops[2])
                if "idx" in parts: lane = np.arange(THREADS) // 32 * 32 + int(ops[2])
                return self.set(ops[0], x[lane], active)
            if op == "ld":
                names = re.findall(r"[%\w]+", ops[0])
                data = self.load(self.address(ops[1]), len(names) * width // 8, active)
                for n, x in zip(names, data.copy().view(U[width]).T): self.set(n, x, active)
                return
            if op == "st":
                names = re.findall(r"[-%\w]+", ops[1])
                data = np.stack([self.value(x, width) for x in names], 1)
                return self.store(self.address(ops[0]), np.ascontiguousarray(data).view(np.uint8), active)
            if name == "mov.pred":
                x = self.reg[ops[1]] if ops[1].startswith("%") else np.full(THREADS, int(ops[1]) != 0)
                return self.set(ops[0], x, active)
            if op == "mov":
                if ops[1].startswith("{"):
                    lo, hi = (self.value(x, width // 2).astype(U[width]) for x in re.findall(r"[%\w]+", ops[1]))
                    return self.set(ops[0], lo | hi << U[width](width // 2), active)
                if ops[0].startswith("{"):
                    x = self.value(ops[1], width)
                    for n, name in enumerate(re.findall(r"[%\w]+", ops[0])):
                        self.set(name, (x >> U[width](n * width // 2)).astype(U[width // 2]), active)
                    return
                return self.set(ops[0], self.value(ops[1], width), active)
            if op == "selp":
                x, y = (self.value(o, width) for o in ops[1:3])
                return self.set(ops[0], np.where(self.reg[ops[3]], x, y), active)
            if op == "setp":
                test = parts[1]
                if kind.startswith("f"):
                    x, y = (f32(self.value(o, 32)) for o in ops[1:3])
                    if test.endswith("u") and test not in ("lu",):
                        r = COMPARE[test[:-1]](x, y) | np.isnan(x) | np.isnan(y)
                    else: r = COMPARE[test](x, y) & ~(np.isnan(x) | np.isnan(y)) if test != "ne" else (x != y) & ~(np.isnan(x) | np.isnan(y))
                else:
                    x, y = (self.value(o, width, signed) for o in ops[1:3])
                    r = COMPARE[test](x, y)
                return self.set(ops[0], r, active)
            if kind == "pred":
                if op == "not": return self.set(ops[0], ~self.reg[ops[1]], active)
                x, y = (self.reg[o] for o in ops[1:3])
                return self.set(ops[0], {"and": x & y, "or": x | y, "xor": x ^ y}[op], active)
            if op == "cvt":
                to, source = parts[-2], parts[-1]
                if source == "bf16": return self.set(ops[0], bits(from_bf16(self.value(ops[1], 16))), active)
                if to == "bf16": return self.set(ops[0], to_bf16(f32(self.value(ops[1], 32))), active)
                if to == "bf16x2":
                    hi, lo = (to_bf16(f32(self.value(o, 32))).astype(np.uint32) for o in ops[1:3])
                    return self.set(ops[0], lo | hi << np.uint32(16), active)
                x = self.value(ops[1], int(source[1:]), source[0] == "s")
                return self.set(ops[0], x.astype((S if source[0] == "s" else U)[int(to[1:])]), active)
            if kind.startswith("f"):
                x = [f32(self.value(o, 32)) for o in ops[1:]]
                r = {"mul": lambda: x[0] * x[1], "add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1],
                     "abs": lambda: np.abs(x[0]), "neg": lambda: -x[0], "ex2": lambda: np.exp2(x[0]),
                     "lg2": lambda: np.log2(x[0]), "rcp": lambda: 1 / x[0], "div": lambda: x[0] / x[1],
                     "max": lambda: np.maximum(x[0], x[1]) if "NaN" in parts else np.fmax(x[0], x[1]),
                     "min": lambda: np.minimum(x[0], x[1]) if "NaN" in parts else np.fmin(x[0], x[1]),
                     "fma": lambda: x[0] * x[1] + x[2]}[op]()
                return self.set(ops[0], bits(r), active)
            if op == "bfe":
                x = self.value(ops[1], width)
                return self.set(ops[0], (x >> U[width](int(ops[2]))) & U[width]((1 << int(ops[3])) - 1), active)
            if op in ("shl", "shr"):
                x, n = self.value(ops[1], width, signed), self.value(ops[2], 32).astype((S if signed else U)[width])
                return self.set(ops[0], x << n if op == "shl" else x >> n, active)
            if op == "mul" and "wide" in parts:
                big = (S if signed else U)[2 * width]
                return self.set(ops[0], self.value(ops[1], width, signed).astype(big) * self.value(ops[2], width, signed).astype(big), active)
            x = [self.value(o, width, signed) for o in ops[1:]]
            if op == "mad" and "wide" in parts: raise NotImplementedError(name)
            r = {"add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1],
                 "mad": lambda: x[0] * x[1] + x[2], "and": lambda: x[0] & x[1], "or": lambda: x[0] | x[1],
                 "xor": lambda: x[0] ^ x[1], "min": lambda: np.minimum(*x), "max": lambda: np.maximum(*x),
                 "neg": lambda: -x[0], "not": lambda: ~x[0], "div": lambda: x[0] // x[1], "rem": lambda: x[0] % x[1]}[op]()
            return self.set(ops[0], r, active)

    def finish(self, to, source, size):
        for n in np.unique(size):
            some = size == n
            data = np.zeros((some.sum(), 16), np.uint8)
            if n: data[:, :n] = self.memory[source[some][:, None] + np.arange(n) - GLOBAL]
            self.shared[to[some][:, None] + np.arange(16)] = data

    def ldmatrix(self, ops, trans, active):
        names = re.findall(r"%\w+", ops[0]); address = self.address(ops[1])
        rows = self.shared[address[:, None] + np.arange(16)].copy().view(np.uint16)  # thread: its row of 8
        rows = rows.reshape(4, 4, 8, 8)  # warp, matrix, row, column
        if trans: rows = rows.swapaxes(2, 3)
        pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(4, 4, 32)  # lane = row * 4 + pair
        for n, name in enumerate(names): self.set(name, pairs[:, n].reshape(THREADS), active)

    def stmatrix(self, ops, trans, active):
        names = re.findall(r"%\w+", ops[1]); address = self.address(ops[0]).reshape(4, 4, 8)
        for n, name in enumerate(names):
            tile = np.ascontiguousarray(self.value(name, 32)).view(np.uint16).reshape(4, 8, 8)
            if trans: tile = tile.swapaxes(1, 2)
            data = np.ascontiguousarray(tile).view(np.uint8).reshape(4, 8, 16)
            w = self.warp
            self.shared[address[w, n][..., None] + np.arange(16)] = data[w]

    def mma(self, ops, active):
        d, a, b, c = ([x for x in re.findall(r"[%\w]+", o)] for o in ops)
        def halves(name): 
            x = self.value(name, 32); return from_bf16(np.stack([x & 0xFFFF, x >> 16], 1).astype(np.uint16)).reshape(4, 8, 4, 2)
        A = np.zeros((4, 16, 16)); Bm = np.zeros((4, 16, 8)); C = np.zeros((4, 16, 8))
        for n in range(4):  # a0: row g; a1: row g+8; a2: col +8; a3: both
            A[:, 8 * (n % 2): 8 * (n % 2) + 8, 8 * (n // 2): 8 * (n // 2) + 8] = halves(a[n]).reshape(4, 8, 8)
        for n in range(2):
            Bm[:, 8 * n: 8 * n + 8] = halves(b[n]).reshape(4, 8, 8).swapaxes(1, 2)
        for n in range(4):
            C[:, 8 * (n // 2): 8 * (n // 2) + 8, n % 2:: 2] = f32(self.value(c[n], 32)).reshape(4, 8, 4)
        D = (A @ Bm + C).astype(np.float32)
        for n in range(4):
            x = D[:, 8 * (n // 2): 8 * (n // 2) + 8, n % 2:: 2].reshape(THREADS)
            self.set(d[n], bits(x), active)


COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
           "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
