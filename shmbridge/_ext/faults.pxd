cdef extern from "faults.h" nogil:
    enum:
        FAULTS_COMPILED
    void fault_hit(const char* label) noexcept
