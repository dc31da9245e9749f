"""Continuous batching on a pool of states: prefill, prefix hits, decode, drafts, eviction."""

from types import SimpleNamespace as Request

import torch

from flashkda import chunk_kda, fused_recurrent_kda

H, D, PREFIX, DRAFT, BATCH, NULL = 2, 128, 64, 3, 4, 0  # slot 0 holds no state: it is the pad
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATE = {"A_log": torch.zeros(H, device=DEVICE), "lower_bound": -5.0, "state_v_first": True}
GATE |= {f"use_{x}_in_kernel": True for x in ("gate", "qk_l2norm", "beta_sigmoid")}


def tokens(count):  # q, k, v, gate logits and beta logits, as a model would compute them
    shapes = [(1, count, H, D)] * 4 + [(1, count, H)]
    return [torch.randn(shape).to(DEVICE, torch.bfloat16) for shape in shapes]


def table(rows, pad=NULL, size=BATCH):  # always of one size, as a CUDA graph wants it
    return torch.tensor(rows + [pad] * (size - len(rows)), dtype=torch.int32, device=DEVICE)


def advance(function, pool, batch, counts, accepted, **tables):  # one call for a whole batch
    taken = [[x[:, r.done :][:, :n] for x in r.stream] for r, n in zip(batch, counts, strict=True)]
    rows = [torch.cat(xs, dim=1) for xs in zip(*taken, strict=True)]
    tables["cu_seqlens"] = table([0, *counts], 0, BATCH + 1).cumsum(0)  # padding has no tokens
    o, _ = function(*rows, initial_state=pool, pad_slot_id=NULL, **tables, **GATE)
    for r, count, part in zip(batch, accepted, o.split(counts, dim=1), strict=True):
        r.outputs.append(part[:, :count])
        r.done, r.accepted = r.done + count, min(count, r.width)  # the rest of a draft is void


torch.manual_seed(0)
prompts, requests = {name: tokens(PREFIX) for name in "abc"}, []
for name, n in zip("aabacab", (66, 37, 90, 41, 52, 73, 35), strict=True):
    stream = [torch.cat(xs, dim=1) for xs in zip(prompts[name], tokens(n), strict=True)]
    sizes = {"prompt": PREFIX + n - 30, "length": PREFIX + n, "width": DRAFT if n % 2 else 1}
    requests.append(Request(prefix=name, stream=stream, outputs=[], **sizes))
pool = torch.full((10, H, D, D), float("nan"), device=DEVICE)  # what nobody wrote is not read
free, cache = list(range(1, len(pool))), {}  # slots; prefixes, the oldest first
waiting, running = list(requests), []
while waiting or running:
    new, kept = [], {}  # requests to prefill; prefixes that they leave in the cache
    while waiting and len(running + new) < BATCH:
        r, hit = waiting[0], waiting[0].prefix in cache
        idle = [x for x in cache if x not in {r.prefix, *(y.prefix for y in new)}]
        if len(free) + len(idle) <= r.width:  # one slot more, to keep its prefix
            break
        while len(free) <= r.width:  # the oldest prefix makes room
            free.append(cache.pop(idle.pop(0)))
        r.slots, r.done = [free.pop() for _ in range(r.width)], PREFIX * hit
        r.source = cache.get(r.prefix, NULL)
        r.keep = -1 if hit or r.prefix in kept else kept.setdefault(r.prefix, free.pop())
        new.append(waiting.pop(0))
    if new:  # from the state of a prefix, or from none, to the slots of the request
        where = {"ssm_state_indices": table([r.source for r in new])}
        where["final_state_indices"] = table([r.slots[-1] for r in new])
        where["checkpoint_offsets"] = table([PREFIX for _ in new])
        where["checkpoint_indices"] = table([r.keep for r in new])
        counts = [r.prompt - r.done for r in new]
        advance(chunk_kda, pool, new, counts, counts, checkpoint_states=pool, **where)
    running, cache = running + new, cache | kept
    counts = [min(r.width, r.length - r.done) for r in running]
    accepted = [1 + r.done % n for r, n in zip(running, counts, strict=True)]  # of a draft
    # A token each, or a draft: the state after every token, to start from any next time.
    slots = table([r.slots * (DRAFT // r.width) for r in running], [NULL] * DRAFT)
    begin = table([r.accepted for r in running])
    where = {"ssm_state_indices": slots, "num_accepted_tokens": begin}
    advance(fused_recurrent_kda, pool, running, counts, accepted, **where)
    free += [slot for r in running if r.done == r.length for slot in r.slots]
    running = [r for r in running if r.done < r.length]
assert len(cache) < len(prompts)  # some prefix had to go
assert any(r.source != NULL for r in requests)  # and some was found
for r in requests:  # against each request on its own, in one go
    got, (want, _) = torch.cat(r.outputs, dim=1), chunk_kda(*r.stream, **GATE)
    want = want[:, r.length - got.shape[1] :]  # all but a prefix that was found
    assert (got - want).float().norm() < 1e-2 * want.float().norm()
print(f"{len(requests)} requests served on {DEVICE}")
