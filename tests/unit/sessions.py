"""A learner's session of two small fragments, and the frames a server sends it."""


import numpy as np

from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.learner.session import Session
from syncer.protocol import DTYPE_F32
from syncer.wire import encode
from syncer.wire.messages import Bcast, FinalFragment, Manifest, Pull
from tests.bulk_frames import encode_bcast, encode_final_fragment

FINGERPRINT = bytes(range(32))
LAYOUT = Layout((FragmentLayout(AVG, (2,)), FragmentLayout(RDA, (1, 2))))
NUMELS = (2, 3)


def make(learner=0, dtype=DTYPE_F32, num_streams=2, **options) -> Session:
    return Session(LAYOUT, FINGERPRINT, learner=learner, dtype=dtype, num_streams=num_streams,
                   **options)


def values(fragment: int, fill: float) -> bytes:
    return np.full(NUMELS[fragment], fill, "<f4").tobytes()


def bcast(fragment: int, version: int, fill: float) -> bytes:
    return encode_bcast(Bcast(fragment, version, memoryview(values(fragment, fill))))


def final(fragment: int, version: int, fill: float) -> bytes:
    return encode_final_fragment(
        FinalFragment(fragment, version, memoryview(values(fragment, fill))))


def pull(fragment: int, step: int, attempt: int = 1) -> bytes:
    return encode.encode_pull(Pull(fragment, step, attempt))


def manifest(step: int, *versions: int) -> bytes:
    return encode.encode_manifest(Manifest(step, versions))
