/* Python numbers to C arrays, without an array in between. Each function returns -1, or the index of the first value that does not fit.
 *
 * The compact-int path reads CPython's own representation behind a version guard; everything unusual goes the checked way round.
 */
#ifndef SHMBRIDGE_PYLIST_H
#define SHMBRIDGE_PYLIST_H

#include <Python.h>
#include <math.h>
#include <stdint.h>

/* The value of an int-like object. 0, or -1 with a Python error cleared: not an integer, or beyond 64 bits. */
static inline int int_value(PyObject *item, int64_t *value) {
    if (PyLong_CheckExact(item)) {
#if PY_VERSION_HEX >= 0x030C0000
        if (PyUnstable_Long_IsCompact((PyLongObject *)item)) {
            *value = PyUnstable_Long_CompactValue((PyLongObject *)item);
            return 0;
        }
#else
        Py_ssize_t size = Py_SIZE(item);
        if (size >= -1 && size <= 1) {
            *value = size * (int64_t)((PyLongObject *)item)->ob_digit[0];
            return 0;
        }
#endif
    }
    PyObject *exact = PyNumber_Index(item);
    int overflow = 0;
    if (exact) {
        *value = PyLong_AsLongLongAndOverflow(exact, &overflow);
        Py_DECREF(exact);
    }
    if (!exact || overflow || (*value == -1 && PyErr_Occurred())) {
        PyErr_Clear();
        return -1;
    }
    return 0;
}

static inline int float_value(PyObject *item, double *value) {
    if (PyFloat_CheckExact(item)) {
        *value = PyFloat_AS_DOUBLE(item);
        return 0;
    }
    *value = PyFloat_AsDouble(item);
    if (*value == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return -1;
    }
    return 0;
}

static inline Py_ssize_t pack_int32(PyObject *const *items, Py_ssize_t count, int32_t *to) {
    int64_t value;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (int_value(items[i], &value) != 0 || value < INT32_MIN || value > INT32_MAX) return i;
        to[i] = (int32_t)value;
    }
    return -1;
}

static inline Py_ssize_t pack_uint8(PyObject *const *items, Py_ssize_t count, uint8_t *to) {
    int64_t value;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (int_value(items[i], &value) != 0 || value < 0 || value > UINT8_MAX) return i;
        to[i] = (uint8_t)value;
    }
    return -1;
}

static inline Py_ssize_t pack_float32(PyObject *const *items, Py_ssize_t count, float *to) {
    double value;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (float_value(items[i], &value) != 0) return i;
        to[i] = (float)value;
    }
    return -1;
}

/* Atropos masks: -100 where not trained, else the token itself. 1 where trained; the index of the first value that is neither. */
static inline Py_ssize_t fold_masks(PyObject *const *masks, PyObject *const *tokens, Py_ssize_t count, uint8_t *to) {
    int64_t mask, token;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (masks[i] == tokens[i]) {
            to[i] = 1;
            continue;
        }
        if (int_value(masks[i], &mask) != 0 || int_value(tokens[i], &token) != 0) return i;
        if (mask != -100 && mask != token) return i;
        to[i] = mask != -100;
    }
    return -1;
}

static inline Py_ssize_t first_non_finite32(const float *values, Py_ssize_t count) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < count; i++) bad |= !isfinite(values[i]);
    if (!bad) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!isfinite(values[i])) return i;
    return -1;
}

#endif
