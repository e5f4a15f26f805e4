# C surface of contributions: pushes as the merge sees them.
from syncer.core.rounds.carry cimport Carried
from syncer.core.rounds.policy cimport Policy
from syncer.core.rounds.round cimport Round

cdef object contribution_of(Policy policy, object push, Carried late=*)
cdef list contributions_of(Policy policy, Round round)
cpdef double most_over(list weighed, object learner, double weight) except? -1
cdef bint any_over(list weighed) except -1
cdef list weighed_of(Policy policy, object contributions)
