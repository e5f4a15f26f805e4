"""What an error number of a file system says: for good, lacking, or a moment's trouble.

Must not make a call.
"""

from __future__ import annotations

import errno

PERMANENT = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS,
    errno.EXDEV, errno.EMLINK, errno.EBADF, errno.EEXIST,
})
"""Errors that the same call will give again; everything else may be a moment's trouble."""
LACKING = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What a file system says that has no such call."""
RETRY_PAUSE_S = 0.1
"""Before a call that failed is tried again."""
