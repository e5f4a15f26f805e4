"""What a connection group has still to send, and in which order.

Pure queue logic over frames and images; it must not touch a socket or a clock.

- At most one unsent version per fragment: a newer one takes the place of a queued one, and a
  message that has begun is finished before a newer version of its fragment begins. So a reader in
  the middle of a fragment pins that version and no other.
- A broadcast that a pull waits for goes before those that nobody waits for.
- A version is taken in once: nothing is sent twice on a connection, not even by a second catch-up.
  What the peer came with (rule 3.10) is as if it had been sent.
- A catch-up ends when each fragment went out once, as new as it was when the catch-up began. What
  was taken in since is broadcast like any other, also to a reader that is slower than the
  broadcasts: waiting for an empty queue would hold it for ever. A pull waits for its fragment
  either way.
- A pull waits until the broadcasts of its fragment that were queued before it are with the kernel.
  If it could overtake them, the answer would carry an anchor that is one round old. It replaces an
  unsent pull of the same fragment: that round has closed or was relaunched.
- rule 18.4. A peer that takes changes is sent one where it has the version that is changed: the one
  that was sent before on this connection, or kept. Anything in between that was skipped, and what
  comes first on a connection, needs the whole. That is decided when the message begins.
- The final cut replaces what is queued; its manifest waits for its last fragment.
"""

from syncer.protocol import Msg

FINAL = Msg.FINAL_FRAGMENT

cdef enum:
    ENCODE_BYTES = 1048576      # that are encoded, and then sent while they are in the cache


cdef class Bulk:
    """A broadcast or final fragment on its way to one group."""

    def __init__(self, image):
        self.image = image
        self.rough = 0
        self.final = image.kind == FINAL

    cdef Py_ssize_t refine(self, Py_ssize_t offset, Py_ssize_t rough) except -1:
        """Make some of the last `rough` bytes before this offset of the tensor final; returns how
        many."""
        cdef Py_ssize_t count = min(rough, ENCODE_BYTES)
        self.image.ready(offset - rough + count)
        return count


cdef class Outbox:
    """Queue of one connection group over `fragments` fragments.

    Large: what comes in, what goes out and what is still owed are three views of one order.
    """

    def __init__(self, fragments):
        self.fragments = fragments
        self.stripes = 1
        self.queued = {}
        self.under_way = []
        self.newest = {}
        self.sent = {}
        self.owed = {}
        self.backlog = set()
        self.pulls = {}
        self.small = []

    # ---------------------------------------------------------------------------- taking in
    def frame(self, bytes frame):
        """Queue a small frame for the control socket."""
        self.small.append(frame)

    def keep(self, fragment, version):
        """The peer has this version of the fragment already; before anything is queued."""
        self.newest[fragment] = version
        self.sent[fragment] = version

    cpdef bint broadcast(self, object image):
        """Queue a version of a fragment; False if it is not newer than what was taken in."""
        cdef Bulk bulk
        fragment = image.fragment
        if self.finalizing or self.newest.get(fragment, -1) >= image.version:
            return False
        self.newest[fragment] = image.version
        bulk = self.queued.get(fragment)
        if bulk is None:
            self.queued[fragment] = Bulk(image)
        else:
            bulk.image = image
        return True

    cpdef object pull(self, Py_ssize_t fragment, bytes frame):
        """Queue PULL_REQ `frame` behind the broadcasts of its fragment."""
        cdef Bulk bulk, gate = None
        if self.finalizing:
            return
        self.pulls.pop(fragment, None)
        for bulk in (*self.under_way, *self.queued.values()):
            if bulk.image.fragment == fragment:
                bulk.pull = None
                gate = bulk
        if gate is None:
            self.pulls[fragment] = frame
        else:
            gate.pull = frame
            self._bring_forward()

    cdef object _bring_forward(self):
        """Messages with a pull behind them first, each kind in its order."""
        cdef Bulk bulk
        cdef dict plain = {}, order = {}
        for key, bulk in self.queued.items():
            (plain if bulk.pull is None else order)[key] = bulk
        if plain:
            order.update(plain)
            self.queued = order

    def catch_up(self, images):
        """Queue these images; `caught_up` answers once each of them, or a newer one, was sent."""
        for image in images:
            self.broadcast(image)
            if self.sent.get(image.fragment, -1) < image.version:
                self.owed[image.fragment] = image.version
        self.catching_up = True

    def final_cut(self, images, bytes manifest):
        """Queue the final fragments and, behind the last of them, the manifest.

        Broadcasts that have not begun, and pulls, have no use any more and are dropped.
        """
        cdef Bulk bulk
        self.finalizing = True
        self.catching_up = False
        self.owed.clear()
        self.backlog.clear()
        self.queued.clear()
        self.pulls.clear()
        for bulk in self.under_way:
            bulk.pull = None
        for image in images:
            self.queued[image.fragment] = Bulk(image)
        self.manifest = manifest
        self.finals_left = len(images)

    # -------------------------------------------------------------------------- handing out
    cpdef list take_small(self):
        """Every small frame that may go now, in order, for the control socket."""
        return self.take_frames() + self.take_pulls()

    cdef list take_frames(self):
        """Those that are no pulls."""
        cdef list frames = self.small
        if frames:
            self.small = []
        return frames

    cdef list take_pulls(self, Bulk behind=None):
        """Those that are, and before them the one that waits for this message, if it has been
        handed out to its end and they go on the same socket behind it."""
        cdef list frames = []
        if behind is not None and behind.pull is not None and behind.left == 0:
            frames.append(behind.pull)
            behind.pull = None
        if self.pulls:
            frames.extend(self.pulls.values())
            self.pulls.clear()
        return frames

    cpdef tuple next_piece(self):
        """(bulk, buffers) of the next CHUNK frame, or None; answer with `piece_sent(bulk)`. The
        buffers are everybody's. Of a tensor, the last `rough` bytes are final only after `refine`:
        what is encoded right before it is sent is copied from the cache."""
        cdef Bulk bulk = self.feeding
        cdef Py_ssize_t size
        if bulk is None:
            bulk = self._start()
            if bulk is None:
                return None
        buffers = bulk.pieces[len(bulk.pieces) - bulk.left]
        bulk.offset += len(buffers[1])
        size = len(buffers[1])
        if size <= ENCODE_BYTES or bulk.image.is_ready(bulk.offset):
            bulk.image.ready(bulk.offset)
            bulk.rough = 0
        else:
            bulk.rough = size
        bulk.left -= 1
        bulk.open += 1
        self.feeding = bulk if bulk.left else None
        return bulk, buffers

    cdef Bulk _start(self):
        """Begin the first queued message whose fragment is not in the middle of an older one."""
        cdef Bulk bulk, other
        for key, bulk in self.queued.items():
            for other in self.under_way:
                if other.image.fragment == bulk.image.fragment and other.final == bulk.final:
                    break
            else:
                del self.queued[key]
                bulk.image = self._smallest(bulk.image)
                bulk.pieces = bulk.image.pieces(self.next_id, self.stripes)
                bulk.left = len(bulk.pieces)
                self.next_id += 1
                self.under_way.append(bulk)
                return bulk
        return None

    # rule 18.4
    cdef object _smallest(self, object image):
        """The same version as a change, if the peer can take it."""
        if self.takes_changes:
            change = image.change
            if change is not None and self.sent.get(image.fragment, -1) == change.base:
                return change
        return image

    def bytes_of(self, image):
        """How many bytes an image takes that was just queued, as far as can be known."""
        cdef Bulk bulk
        change = image.change if self.takes_changes else None
        if change is not None and (self.sent.get(image.fragment, -1) == change.base or any(
                [bulk.image.fragment == image.fragment and bulk.image.version == change.base
                 for bulk in self.under_way])):
            return len(change.body)
        return len(image.body)

    cpdef object piece_sent(self, Bulk bulk):
        """All bytes of one piece of `bulk` are with the kernel."""
        bulk.open -= 1
        if bulk.open or bulk.left:
            return
        self.under_way.remove(bulk)
        fragment = bulk.image.fragment
        if bulk.final:
            self.finals_left -= 1
            if not self.finals_left and self.manifest is not None:
                self.small.append(self.manifest)
                self.manifest = None
        else:
            self.sent[fragment] = bulk.image.version
            if self.owed.get(fragment, bulk.image.version + 1) <= bulk.image.version:
                del self.owed[fragment]
            self.backlog.discard(fragment)
        if bulk.pull is not None:
            self.pulls[fragment] = bulk.pull
        bulk.image = bulk.pieces = None

    cpdef tuple caught_up(self):
        """The version of each fragment that a pull comes behind, once, when a catch-up has ended.

        Those are the newest taken in: sent, or queued before any pull of the fragment. Otherwise
        None.
        """
        cdef Bulk bulk
        if not self.catching_up or self.owed:
            return None
        self.catching_up = False
        for bulk in (*self.under_way, *self.queued.values()):
            self.backlog.add(bulk.image.fragment)
        return tuple([self.newest[fragment] for fragment in range(self.fragments)])

    cpdef bint has_pieces(self):
        """Whether `next_piece` would give one."""
        cdef Bulk bulk, other
        if self.feeding is not None:
            return True
        for bulk in self.queued.values():
            for other in self.under_way:
                if other.image.fragment == bulk.image.fragment and other.final == bulk.final:
                    break
            else:
                return True
        return False

    cpdef bint awaited(self):
        """Whether something waits to go that a round, or the peer, waits for: a small frame, or a
        message with a pull behind it."""
        cdef Bulk bulk
        if self.small or self.pulls:
            return True
        for bulk in (*self.under_way, *self.queued.values()):
            if bulk.pull is not None:
                return True
        return False

    @property
    def trailing(self):
        """Whether messages that were queued when the catch-up ended are still to go."""
        return bool(self.backlog)

    def has_taken(self, versions):
        """Whether a catch-up of these versions, by fragment, would queue nothing."""
        return all([self.newest.get(fragment, -1) >= version
                    for fragment, version in enumerate(versions)])

    @property
    def empty(self):
        """Nothing is left to hand out, and every piece handed out was sent."""
        return not (self.queued or self.under_way or self.small or self.pulls)

    @property
    def held_versions(self):
        """(fragment, version) of every image this queue keeps alive."""
        cdef Bulk bulk
        return [(bulk.image.fragment, bulk.image.version)
                for bulk in (*self.under_way, *self.queued.values())]

    def drop(self):
        """Forget everything; pieces handed out keep their own references."""
        self.queued.clear()
        self.under_way.clear()
        self.small.clear()
        self.pulls.clear()
        self.feeding = None
        self.manifest = None
        self.owed.clear()
        self.backlog.clear()
        self.catching_up = False
