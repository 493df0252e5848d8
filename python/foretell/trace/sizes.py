"""Sizes of the small models that are traced: all different, each with a prime of its own, so that they can be recognised.

The tensors hold no data, so large primes cost nothing; only the numbers that loops run over (experts, chunks) are small.
`PROBE` is what tables are made from, `CHECK` is used to tell formulas apart and to test a table at other sizes.
"""

PROBE = dict(b=19, s=8 * 11 * 139, d=8 * 13, k=7, g=3, h=21 * 16 * 29, f=16 * 41, v=8 * 101 * 127, r=23, E=11, t=5, m=16 * 31,
             e=16 * 37, w=8 * 2657, p=8 * 3001, u=8 * 173, c=9, x=8 * 43, y=8 * 47, z=16 * 53,
             i=71, j=71 * 67, a=2 * 61, l=2 * 59)
CHECK = dict(b=4, s=1408, d=64, k=2, g=3, h=672, f=1728, v=5120, r=8, E=8, t=4, m=352, e=480, w=2600, p=2944, u=704, c=5, x=32, y=72, z=416,
             i=4, j=8, a=64, l=96)
OTHER = dict(b=6, s=2112, d=128, k=3, g=4, h=768, f=2048, v=32000, r=16, E=6, t=3, m=256, e=512, w=3000, p=4224, u=832, c=7, x=64, y=128, z=512,
             i=3, j=12, a=128, l=128)
# The same for compiled steps: what is fused and kept depends on sizes, so these are a usual
# model's, and multiples of 64 or 128, as Inductor pads no tensor then.
COMPILED_PROBE = dict(b=19, s=128 * 17, d=64 * 3, k=7, g=5, h=64 * 70, f=64 * 241, v=64 * 2003, r=23, p=64 * 47, c=9)
COMPILED_CHECK = dict(b=5, s=128 * 11, d=64, k=11, g=4, h=44 * 96, f=64 * 113, v=64 * 509, r=8, p=64 * 29, c=5)
COMPILED_OTHER = dict(b=6, s=1920, d=128, k=6, g=4, h=3840, f=8192, v=32000, r=16, p=4224, c=7)


def of(key):
    """`(probe, check, other)` for a table's key."""
    if key["experts"] != "none" and key["adapter"].startswith("qlora"):     # a router has as many outer blocks as `PROBE` has keys
        return {**PROBE, "k": 29}, CHECK, OTHER
    if key["architecture"].startswith("granite_hybrid"):        # heads that divide twice the features, rows of a multiple of 16 bytes
        return {**PROBE, "j": 56, "a": 4 * 61}, CHECK, {**OTHER, "j": 16}
    if key["loss"].startswith("dpo"):                           # pairs
        return {**PROBE, "b": 2 * 19}, CHECK, OTHER
    return (PROBE, CHECK, OTHER) if key["compiled"] == "none" else (COMPILED_PROBE, COMPILED_CHECK, COMPILED_OTHER)


def chunks(rows, count):
    """Chunk length `q` that cuts `rows` into `count` chunks `c` with a shorter last one."""
    length = rows // count + 7
    return {"q": length, "c": -(-rows // length)}


def liger_chunks(rows, vocabulary, hidden):
    """Liger's rule for its fused head and loss."""
    length = -(-rows // -(-vocabulary // hidden))
    length = min(1 << (length - 1).bit_length(), rows)
    return {"q": length, "c": -(-rows // length)}


def resolve(base, tied_width=False):
    """All sizes from the independent ones: query heads from groups, and the hidden size where it must be heads x width."""
    sizes = dict(base)
    sizes["n"] = sizes["k"] * sizes.pop("g")
    if tied_width:
        sizes["h"] = sizes["n"] * sizes["d"]
    return sizes
