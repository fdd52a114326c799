/* Python numbers to C arrays, without an array in between. Each function returns -1, or the index of the
 * first value that does not fit; a Python error is set then only if it is none of the value's own.
 *
 * `row` is a list or tuple of at least `count` items. Exact ints and floats are read as CPython keeps them,
 * behind a version guard, and run no Python code; everything else goes the checked way round, after which the
 * row is looked at again: that code may have changed it.
 */
#ifndef SHMBRIDGE_PYLIST_H
#define SHMBRIDGE_PYLIST_H

#include <Python.h>
#include <stdint.h>

#if PY_VERSION_HEX >= 0x030C0000
#define is_compact(item) PyUnstable_Long_IsCompact((PyLongObject *)(item))
#define compact_value(item) ((int64_t)PyUnstable_Long_CompactValue((PyLongObject *)(item)))
#else
#define is_compact(item) ((size_t)(Py_SIZE(item) + 1) <= 2)
#define compact_value(item) ((int64_t)Py_SIZE(item) * (int64_t)((PyLongObject *)(item))->ob_digit[0])
#endif

/* The objects of a list lie one after another as a rule, but not always:
 * they are asked for this far ahead. */
#define OBJECTS_AHEAD 16
#define prefetch_ahead(items, i, count) \
    if ((i) + OBJECTS_AHEAD < (count)) __builtin_prefetch((items)[(i) + OBJECTS_AHEAD])

static inline int row_is_there(PyObject *row, Py_ssize_t count) {
    return PySequence_Fast_GET_SIZE(row) >= count;
}

/* An error of the value's own becomes "does not fit"; an interrupt or want of memory stays set. */
static inline void forget_bad_value(void) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception) &&
        !PyErr_ExceptionMatches(PyExc_MemoryError))
        PyErr_Clear();
}

/* The value of an int-like object. 0, or -1: not an integer, or beyond 64 bits. */
static int int_value(PyObject *item, int64_t *value) {
    int overflow = 0;
    PyObject *exact;
    Py_INCREF(item);
    exact = PyNumber_Index(item);
    Py_DECREF(item);
    if (exact) {
        *value = PyLong_AsLongLongAndOverflow(exact, &overflow);
        Py_DECREF(exact);
    }
    if (!exact || overflow || (*value == -1 && PyErr_Occurred())) {
        forget_bad_value();
        return -1;
    }
    return 0;
}

static int float_value(PyObject *item, double *value) {
    Py_INCREF(item);
    *value = PyFloat_AsDouble(item);
    Py_DECREF(item);
    if (*value == -1.0 && PyErr_Occurred()) {
        forget_bad_value();
        return -1;
    }
    return 0;
}

/* Item `i` of the row as an int64; -1 if it is none. `items` is looked up again if Python code ran. */
static inline int row_int(PyObject *row, PyObject ***items, Py_ssize_t i, Py_ssize_t count, int64_t *value) {
    PyObject *item = (*items)[i];
    if (__builtin_expect(PyLong_CheckExact(item) && is_compact(item), 1)) {
        *value = compact_value(item);
        return 0;
    }
    if (int_value(item, value) != 0 || !row_is_there(row, count)) return -1;
    *items = PySequence_Fast_ITEMS(row);
    return 0;
}

static inline int row_float(PyObject *row, PyObject ***items, Py_ssize_t i, Py_ssize_t count, double *value) {
    PyObject *item = (*items)[i];
    if (__builtin_expect(PyFloat_CheckExact(item), 1)) {
        *value = PyFloat_AS_DOUBLE(item);
        return 0;
    }
    if (float_value(item, value) != 0 || !row_is_there(row, count)) return -1;
    *items = PySequence_Fast_ITEMS(row);
    return 0;
}

static inline Py_ssize_t pack_int32(PyObject *row, Py_ssize_t count, int32_t *to, int64_t least) {
    PyObject **items = PySequence_Fast_ITEMS(row);
    uint64_t span = (uint64_t)INT32_MAX - (uint64_t)least; /* `least` to INT32_MAX, by one comparison */
    int64_t value;
    for (Py_ssize_t i = 0; i < count; i++) {
        prefetch_ahead(items, i, count);
        if (row_int(row, &items, i, count, &value) != 0 || (uint64_t)value - (uint64_t)least > span) return i;
        to[i] = (int32_t)value;
    }
    return -1;
}

static inline Py_ssize_t pack_uint8(PyObject *row, Py_ssize_t count, uint8_t *to) {
    PyObject **items = PySequence_Fast_ITEMS(row);
    int64_t value;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (row_int(row, &items, i, count, &value) != 0 || value != (uint8_t)value) return i;
        to[i] = (uint8_t)value;
    }
    return -1;
}

/* `none_is_nan`: None is a value, too. */
static inline Py_ssize_t pack_float32(PyObject *row, Py_ssize_t count, float *to, int none_is_nan) {
    PyObject **items = PySequence_Fast_ITEMS(row);
    double value;
    for (Py_ssize_t i = 0; i < count; i++) {
        prefetch_ahead(items, i, count);
        if (none_is_nan && items[i] == Py_None) value = Py_NAN;
        else if (row_float(row, &items, i, count, &value) != 0) return i;
        to[i] = (float)value;
    }
    return -1;
}

static inline Py_ssize_t pack_float64(PyObject *row, Py_ssize_t count, double *to) {
    PyObject **items = PySequence_Fast_ITEMS(row);
    for (Py_ssize_t i = 0; i < count; i++)
        if (row_float(row, &items, i, count, &to[i]) != 0) return i;
    return -1;
}

/* Atropos masks: -100 where not trained, else the token itself. 1 where trained;
 * the index of the first value that is neither.
 *
 * `packed` are the row's tokens as they were packed just now; `tokens` the objects, or NULL:
 * a mask often is the very object.
 */
static inline Py_ssize_t fold_masks(PyObject *masks, PyObject *tokens, const int32_t *packed,
                                    Py_ssize_t count, uint8_t *to) {
    PyObject **items = PySequence_Fast_ITEMS(masks), **same = tokens ? PySequence_Fast_ITEMS(tokens) : NULL;
    int64_t mask;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (same && items[i] == same[i]) {
            to[i] = 1;
            continue;
        }
        prefetch_ahead(items, i, count);
        if (row_int(masks, &items, i, count, &mask) != 0 || (mask != -100 && mask != packed[i])) return i;
        to[i] = mask != -100;
        if (same) same = row_is_there(tokens, count) ? PySequence_Fast_ITEMS(tokens) : NULL;
    }
    return -1;
}

#endif
