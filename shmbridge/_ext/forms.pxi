"""The grammar of `put`: the forms that a group's columns may have, and the plan of the group's record.

C reads rows that are lists, tuples, 1-D arrays, CPU tensors or None; (flat array, lengths); 2-D arrays; rows
of rows; one number a row. A Converter (shmbridge.put.convert) turns every other value into one of these.
pack.pxi packs the values.
"""

cdef enum:
    FITS = -1                        # a column's rows are the tokens' rows
    OTHER_ROWS = -2                  # it has another number of rows
    MOST_KEYS = 64                   # whose forms are remembered

cdef object Tensor = None            # torch.Tensor, once the caller has imported torch


def know_tensors(tensor):
    """From now on `tensor` (torch.Tensor) is a form of rows, too."""
    global Tensor
    Tensor = tensor


class Uncommon(Exception):
    """A group needs a Converter, or is wrong."""


cdef class NoConverter:
    """In place of a Converter: ends a plan at the first value that C does not read, or that is wrong."""

    def __getattr__(self, name):
        raise Uncommon


cdef NoConverter NO_CONVERTER = NoConverter()


cdef class ColumnForms:
    """The columns of a lane's table by the keys a group may have them under; makes plans."""

    cdef dict _by_key
    cdef Form _tokens
    cdef Form _masks
    cdef Form _loss_mask
    cdef Form _score
    cdef Form _extra
    cdef object _converter
    cdef RowSampler _sampler
    cdef bint _foreign
    cdef list _keys                  # of the last groups, by place, and their forms
    cdef list _forms

    def __init__(self, dict by_key not None, converter, RowSampler sampler=None, bint foreign=False):
        self._by_key, self._converter, self._sampler, self._foreign = by_key, converter, sampler, foreign
        self._tokens, self._masks, self._loss_mask = by_key["tokens"], by_key["masks"], by_key["loss_mask"]
        self._score, self._extra = by_key["score"], by_key["extra"]
        self._keys, self._forms = [], []

    def plan(self, group, Stamp stamp not None, source=None, bint fold_masks=True):
        """The plan of a group's record. Without `fold_masks`, masks are stored beside loss_mask.

        Raises BadValue; BeyondLayout.
        """
        return self.make_plan(group, stamp, source, fold_masks, self._converter)

    def claimed(self, list columns not None, PackedColumn tokens not None, PackedColumn score,
                Stamp stamp not None):
        """The plan of columns that the caller will write, with `tokens` and `score`; raises as plan()."""
        check_columns(columns)
        return self.checked(columns, tokens, score, stamp, None, None, self._converter)

    cdef Plan make_plan(self, group, Stamp stamp, source, bint fold_masks, converter):
        cdef dict given = <dict>group if type(group) is dict else converter.mapping(group)
        cdef PackedColumn column, score = None, tokens = self.read_tokens(given, group, converter)
        cdef list columns = [tokens]
        cdef dict unknown = None
        cdef object env = None
        cdef bint has_extra = False
        cdef Py_ssize_t place = 0
        cdef Form form
        for key, value in given.items():
            form = self.form_of(key, place)
            place += 1
            if form is self._tokens:
                continue
            if form is self._extra:  # the last column: unknown keys may come into it
                has_extra = True
                continue
            if form is None:
                if key == "env_id":
                    env = value
                    continue
                column = None
            else:
                if form.name is not key and form.name != key and form.name in given:
                    raise BadValue(form.name, -1, -1, key, "twice")
                if form is self._masks and "loss_mask" not in given:
                    self.add_masks(columns, tokens, value, fold_masks, group, converter)
                    continue
                column = read(form, value, group, tokens, converter)
            if column is not None:
                columns.append(column)
                if form is self._score:
                    score = column
            elif self._foreign and isinstance(key, str):
                unknown = {} if unknown is None else unknown
                unknown[key] = value
            else:
                raise BadValue(key, -1, -1, value, "unknown")
        if unknown is not None or has_extra:
            value = given.get("extra")
            value = value if unknown is None else converter.extra(value, unknown)
            columns.append(read(self._extra, value, group, tokens, converter))
        return self.checked(columns, tokens, score, stamp, env, source, converter)

    cdef Form form_of(self, key, Py_ssize_t place):
        """The form of a group's key at this place among its keys, where the last groups had the same, as a rule; or
        None.
        """
        if place < PyList_GET_SIZE(self._keys) and PyList_GET_ITEM(self._keys, place) == <PyObject*>key:
            return <Form>PyList_GET_ITEM(self._forms, place)
        cdef Form form = <Form>(self._by_key.get(key))
        if place < PyList_GET_SIZE(self._keys):
            self._keys[place], self._forms[place] = key, form
        elif place == PyList_GET_SIZE(self._keys) and place < MOST_KEYS:
            self._keys.append(key)
            self._forms.append(form)
        return form

    cdef Plan checked(self, list columns, PackedColumn tokens, PackedColumn score, Stamp stamp, env, source,
                      converter):
        """The plan of columns that fit the tokens; a foreign group may have some that do not."""
        cdef PackedColumn column
        cdef Plan made = Plan.__new__(Plan)
        cdef uint32_t rows = tokens.entries
        cdef bint uneven = False
        cdef Py_ssize_t place
        cdef int64_t row, env_id
        if score is not None and not self._foreign and score.tag == TAG_VALUES and score.entries == rows:
            row = empty_row(tokens, score)
            if row >= 0:
                raise BadValue("tokens", row, -1, None, "scored")
        for place in range(PyList_GET_SIZE(columns)):
            column = <PackedColumn>PyList_GET_ITEM(columns, place)
            row = difference(column, tokens)
            if row != FITS:
                converter.uneven(column, tokens, row)
                uneven = True
        if not small_number(env, &env_id):
            env_id = converter.env_id(env)
        made.lay_out(columns, stamp, rows, tokens.count, uneven, <int32_t>env_id, source, self._sampler)
        return made

    cdef PackedColumn read_tokens(self, dict given, group, converter):
        cdef PackedColumn tokens = read(self._tokens, given.get("tokens"), group, None, converter)
        if not tokens.entries:
            if not given:
                raise BadValue("", -1, -1, None, "no columns")
            raise BadValue("tokens", -1, -1, given.get("tokens", list(given)),
                           "no rows" if "tokens" in given else "no tokens")
        if tokens.validity is not None:
            raise BadValue("tokens", tokens.validity.index(0), -1, None, "null row")
        return tokens

    cdef int add_masks(self, list columns, PackedColumn tokens, value, bint fold, group, converter) except -1:
        """Atropos' masks: to fold into loss_mask as they are packed, or to store beside a loss_mask."""
        cdef PackedColumn column = empty(self._masks, value)
        if column is None and fold:
            column = folded(self._loss_mask, tokens, value)
        if column is not None:
            columns.append(column)
            return 0
        column = read(self._masks, value, group, tokens, converter)
        if column.validity is not None and not self._foreign:
            raise BadValue("masks", column.validity.index(0), -1, None, "null row")
        columns.append(column)
        if column.tag == TAG_VALUES:
            value = converter.loss_mask(value)
            columns.append(read(self._loss_mask, value, group, tokens, converter))
        return 0


cdef class FastPut:
    """A whole `put` of a common group: plans, claims, writes, publishes. Never blocks; producer's thread."""

    cdef ColumnForms _forms
    cdef LaneWriter _writer
    cdef bytes _own_groups           # what ids of groups without one begin with
    cdef uint64_t _most_bytes
    cdef object _look
    cdef public uint64_t groups      # of the producer, put or tried: a group without an id has this as its own
    cdef public uint64_t ahead       # groups stamped with a version that the bridge has not published

    def __init__(self, ColumnForms forms not None, LaneWriter writer not None, str producer_id not None,
                 uint64_t most_bytes, look):
        """`most_bytes` is the largest record the lane takes; `look(group, nulls=False)` is called once a record of
        a group is committed of which its caller may have to be told something.
        """
        self._forms, self._writer, self._most_bytes, self._look = forms, writer, most_bytes, look
        self._own_groups = producer_id.encode() + b":"

    def put(self, group, group_id, version):
        """The record's sequence; None if the group is uncommon or wrong or has no room: nothing has happened.

        A null row is uncommon.
        """
        cdef Plan plan
        cdef Stamp given
        cdef int64_t now = monotonic_ns()
        cdef uint64_t number
        if self._writer.is_blocked(now):
            return None
        given = self.make_stamp(group_id, version)
        if given is None:
            return None
        given.created_ns = now
        # First the number: an interrupt may come once the record is committed, and no two groups may share an id.
        self.groups += 1
        number = self.groups
        try:
            plan = self._forms.make_plan(group, given, None, True, NO_CONVERTER)
            if plan.has_nulls or plan.extent_bytes > self._most_bytes:
                return self.never_was(number)
            self._writer.keep_pace(plan.extent_bytes)
            if not plan.claim_and_write(self._writer):
                return self.never_was(number)
        except (Uncommon, BadValue, LossyMasks, ClaimLost, OverflowError):
            return self.never_was(number)
        if plan.worth_a_look:
            self._look(group, nulls=False)
        return plan.sequence

    cdef object never_was(self, uint64_t number):
        """Takes the number of a group back, unless its values' own code has put another one meanwhile. None."""
        if self.groups == number:
            self.groups -= 1
        return None

    cdef Stamp make_stamp(self, group_id, version):
        """The stamp of a whole train group in its usual form, or None."""
        cdef int64_t began
        cdef bytes raw
        cdef Stamp given
        if group_id is None:
            raw = numbered(self._own_groups, self.groups)
        elif type(group_id) is str and len(<str>group_id) <= 1000:
            try:
                raw = (<str>group_id).encode()
            except UnicodeEncodeError:
                return None
        else:
            return None
        if version is None:
            began = self._writer.policy_version()
        elif not small_number(version, &began) or began < 0:
            return None
        elif began > self._writer.policy_version():
            if self.ahead == 0:  # the first is said in words
                return None
            self.ahead += 1
        given = Stamp.__new__(Stamp)
        given.group_id, given.oldest, given.newest = raw, began, began
        given.said = SAID_NOTHING if version is None else SAID_OLDEST
        return given


cdef bytes numbered(bytes prefix, uint64_t number):
    """`prefix` with a decimal number behind it."""
    cdef char digits[20]
    cdef int first = sizeof(digits)
    cdef Py_ssize_t before = PyBytes_GET_SIZE(prefix)
    while True:
        first -= 1
        digits[first] = <char>(c"0" + number % 10)
        number //= 10
        if not number:
            break
    cdef bytes made = PyBytes_FromStringAndSize(NULL, before + sizeof(digits) - first)
    memcpy(PyBytes_AS_STRING(made), PyBytes_AS_STRING(prefix), before)
    memcpy(PyBytes_AS_STRING(made) + before, digits + first, sizeof(digits) - first)
    return made


cdef inline bint small_number(value, int64_t* to) noexcept:
    """Whether it is None (-1) or an exact int from 0 to 2**31 - 1."""
    cdef int overflow = 0
    to[0] = -1
    if value is None:
        return True
    if not PyLong_CheckExact(value):
        return False
    to[0] = PyLong_AsLongAndOverflow(value, &overflow)
    return not overflow and 0 <= to[0] <= 0x7FFFFFFF


cdef inline const uint32_t* lengths_of(PackedColumn column) noexcept:
    return <const uint32_t*>PyBytes_AS_STRING(column.row_lengths)


cdef inline bint is_valid(PackedColumn column, int64_t row) noexcept:
    return column.validity is None or PyBytes_AS_STRING(column.validity)[row]


cdef inline bint same_lengths(PackedColumn column, PackedColumn tokens) noexcept:
    """Whether both have equal rows."""
    return column.entries == tokens.entries and (
        column.row_lengths is tokens.row_lengths
        or memcmp(lengths_of(column), lengths_of(tokens), 4 * <size_t>tokens.entries) == 0)


cdef int64_t difference(PackedColumn column, PackedColumn tokens) noexcept:
    """FITS, OTHER_ROWS, or the first row that has not one value per token."""
    cdef int64_t row
    if column.tag != TAG_VALUES:
        return FITS
    if column.form.per_record or column.entries != tokens.entries:
        return FITS if column.form.per_record and column.entries == 1 else OTHER_ROWS
    if column.form.per_token and not same_lengths(column, tokens):
        for row in range(column.entries):
            if lengths_of(column)[row] != lengths_of(tokens)[row] and is_valid(column, row):
                return row
    return FITS


cdef int64_t empty_row(PackedColumn tokens, PackedColumn score) noexcept:
    """The first row without tokens that has a score; -1 if there is none."""
    cdef int64_t row
    for row in range(tokens.entries):
        if not lengths_of(tokens)[row] and is_valid(score, row):
            return row
    return -1


cdef PackedColumn read(Form form, value, group, PackedColumn tokens, converter):
    """A column in whatever form; None for side data that is not one value a row, and so no column."""
    cdef PackedColumn column
    if form.kind == KIND_LIST and PyTuple_CheckExact(value) and PyTuple_GET_SIZE(value) == 2:
        column = flat(form, <object>PyTuple_GET_ITEM(value, 0), <object>PyTuple_GET_ITEM(value, 1), tokens)
    else:
        column = empty(form, value)
        if column is None:
            column = values_of(form, value)
    if column is None:
        value = converter.convert(form, value, group, 0 if tokens is None else tokens.entries)
        if value is None or type(value) is PackedColumn:
            return value
        column = values_of(form, value)
        if column is None:
            raise TypeError(f"column {form.name!r} was converted to what C does not read: {value!r:.80}")
    return column


cdef inline PackedColumn empty(Form form, value):
    """A column that is null, [], () or {}; None if it is something."""
    if value is None:
        return begun(form, TAG_NULL, 0, 0, None)
    if (PyList_CheckExact(value) and not PyList_GET_SIZE(value) or
            PyTuple_CheckExact(value) and not PyTuple_GET_SIZE(value)):
        return begun(form, TAG_EMPTY_LIST, 0, 0, None)
    return begun(form, TAG_EMPTY_MAP, 0, 0, None) if type(value) is dict and not value else None


cdef inline PackedColumn values_of(Form form, value):
    """A column of values in a form that is read in C, or None."""
    if form.kind == KIND_SCALAR:
        return scalars(form, value)
    if form.kind == KIND_LIST_LIST:
        return nested(form, <list>value) if PyList_CheckExact(value) else None
    if form.kind != KIND_LIST:
        return None
    if PyList_CheckExact(value):
        return rows_of(form, <list>value)
    if PyTuple_CheckExact(value) and PyTuple_GET_SIZE(value) == 2:
        return flat(form, <object>PyTuple_GET_ITEM(value, 0), <object>PyTuple_GET_ITEM(value, 1), None)
    return matrix(form, value)


cdef inline PackedColumn begun(Form form, int tag, uint32_t entries, uint64_t count, rows,
                               bytes lengths=None):
    cdef PackedColumn column = PackedColumn.__new__(PackedColumn)
    column.form, column.tag, column.entries, column.count = form, tag, entries, count
    column.rows, column.row_lengths = rows, lengths
    return column


cdef bytes without(bytes validity, Py_ssize_t count, Py_ssize_t row):
    """The validity of so many rows with one null more; None says that all are there."""
    if validity is None:
        validity = PyBytes_FromStringAndSize(NULL, count)
        memset(PyBytes_AS_STRING(validity), 1, count)
    PyBytes_AS_STRING(validity)[row] = 0
    return validity


cdef inline cnp.ndarray as_array(value):
    """An exact ndarray, C contiguous, aligned, in native byte order; or None."""
    cdef cnp.ndarray array
    if cnp.PyArray_CheckExact(value):
        array = <cnp.ndarray><PyObject*>value
        return array if cnp.PyArray_ISCARRAY_RO(array) else None
    return of_tensor(value) if type(value) is Tensor else None


cdef cnp.ndarray of_tensor(tensor):
    """The same of a CPU tensor."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # needs a gradient, is on a device, or of a type that NumPy has not
        return None
    return array if cnp.PyArray_CheckExact(array) and cnp.PyArray_ISCARRAY_RO(array) else None


cdef PackedColumn rows_of(Form form, list values):
    """A list of rows, each a list, a tuple, a 1-D array or None."""
    cdef list held = list(values)  # the caller's own list may change, also while the record waits for room
    cdef cnp.ndarray array
    cdef Py_ssize_t row, length, count = PyList_GET_SIZE(held)
    cdef uint64_t total = 0
    cdef bytes raw, validity = None
    cdef uint32_t* lengths
    if count > 0xFFFFFFFF:
        raise BeyondLayout(f"{count} rows, allowed are 2**32 - 1")
    raw = PyBytes_FromStringAndSize(NULL, 4 * count)
    lengths = <uint32_t*>PyBytes_AS_STRING(raw)
    for row in range(count):
        each = <object>PyList_GET_ITEM(held, row)
        if PyList_CheckExact(each):
            length = PyList_GET_SIZE(each)
        elif each is None:
            validity = without(validity, count, row)
            held[row], length = (), 0
        elif isinstance(each, (list, tuple)):
            length = PySequence_Fast_GET_SIZE(each)
        else:
            array = as_array(each)
            if array is None or cnp.PyArray_NDIM(array) != 1:
                return None
            if array is not each:
                held[row] = array
            length = cnp.PyArray_DIM(array, 0)
        if length > 0xFFFFFFFF:
            raise BeyondLayout(f"row {row} has {length} values, allowed are 2**32 - 1")
        lengths[row] = <uint32_t>length
        total += length
    column = begun(form, TAG_VALUES, count, total, held, raw)
    column.validity = validity
    return column


cdef PackedColumn nested(Form form, list values):
    """Rows of rows."""
    cdef PackedColumn column, outer = rows_of(form, values)
    cdef list inner = []
    if outer is None:
        return None
    for each in <list>outer.rows:
        inner.extend(each)
    column = rows_of(form, inner) if <uint64_t>PyList_GET_SIZE(inner) == outer.count else None
    if column is None or column.validity is not None:
        return None
    column.inner_lengths, column.row_lengths = column.row_lengths, outer.row_lengths
    column.entries, column.validity = outer.entries, outer.validity
    return column


cdef PackedColumn flat(Form form, values, given, PackedColumn tokens):
    """(flat array, lengths); `tokens`: of the same group, which may have the very same lengths; or None."""
    cdef PackedColumn column
    cdef cnp.ndarray lengths, array = as_array(values)
    cdef Py_ssize_t row, count
    cdef int64_t length, total = 0
    cdef int kind
    cdef bint no_rows = False
    cdef bytes raw
    if array is None or cnp.PyArray_NDIM(array) != 1:
        return None
    if given is not None and tokens is not None and tokens.given is given:
        if <uint64_t>cnp.PyArray_DIM(array, 0) != tokens.count:
            return None
        return begun(form, TAG_VALUES, tokens.entries, tokens.count, array, tokens.row_lengths)
    if PyList_CheckExact(given):
        no_rows = PyList_GET_SIZE(given) == 0
        lengths = as_array(cnp.PyArray_FROM_O(given)) if all_exact_ints(<list>given) else None
    else:
        lengths = as_array(given)
    if lengths is None or cnp.PyArray_NDIM(lengths) != 1:
        return None
    kind, count = cnp.PyArray_TYPE(lengths), cnp.PyArray_DIM(lengths, 0)
    if not no_rows and kind != cnp.NPY_INT64 and kind != cnp.NPY_INT32 and kind != cnp.NPY_UINT32:
        return None  # two rows of numbers, maybe both empty
    raw = PyBytes_FromStringAndSize(NULL, 4 * count)
    for row in range(count):
        if kind == cnp.NPY_INT64:
            length = (<int64_t*>cnp.PyArray_DATA(lengths))[row]
        elif kind == cnp.NPY_INT32:
            length = (<int32_t*>cnp.PyArray_DATA(lengths))[row]
        else:
            length = (<uint32_t*>cnp.PyArray_DATA(lengths))[row]
        if length < 0 or length > <int64_t>0xFFFFFFFF:
            return None
        (<uint32_t*>PyBytes_AS_STRING(raw))[row] = <uint32_t>length
        total += length
    if total != cnp.PyArray_DIM(array, 0):
        return None
    column = begun(form, TAG_VALUES, <uint32_t>count, total, array, raw)
    column.given = given
    return column


cdef bint all_exact_ints(list values) noexcept:
    for each in values:
        if not PyLong_CheckExact(each):
            return False
    return True


cdef PackedColumn matrix(Form form, value):
    """A 2-D array: rows of one length."""
    cdef Py_ssize_t row, count
    cdef cnp.ndarray array = as_array(value)
    if array is None or cnp.PyArray_NDIM(array) != 2 or cnp.PyArray_DIM(array, 1) > 0xFFFFFFFF:
        return None
    count = cnp.PyArray_DIM(array, 0)
    raw = PyBytes_FromStringAndSize(NULL, 4 * count)
    for row in range(count):
        (<uint32_t*>PyBytes_AS_STRING(raw))[row] = <uint32_t>cnp.PyArray_DIM(array, 1)
    return begun(form, TAG_VALUES, count, cnp.PyArray_SIZE(array), array, raw)


cdef PackedColumn scalars(Form form, value):
    """One number a row: a list or tuple of numbers and None, or a 1-D array."""
    cdef PackedColumn column
    cdef cnp.ndarray array
    cdef Py_ssize_t row, count
    cdef list held
    if PyList_CheckExact(value) or PyTuple_CheckExact(value):
        held = list(value)
        count = PyList_GET_SIZE(held)
        column = begun(form, TAG_VALUES, count, count, [held])
        for row in range(count):
            if PyList_GET_ITEM(held, row) == <PyObject*>None:
                column.validity = without(column.validity, count, row)
                held[row] = False  # the one value that every dtype has
        return column
    array = as_array(value)
    if array is None or cnp.PyArray_NDIM(array) != 1:
        return None
    return begun(form, TAG_VALUES, cnp.PyArray_DIM(array, 0), cnp.PyArray_DIM(array, 0), array)


cdef PackedColumn folded(Form form, PackedColumn tokens, value):
    """Atropos' masks as a loss_mask to fold while it is packed; None if they are no lists like the tokens."""
    cdef PackedColumn column
    cdef list masks
    if not isinstance(value, (list, tuple)):
        return None
    masks = <list>value if PyList_CheckExact(value) else list(value)
    for each in masks:
        if not isinstance(each, (list, tuple)):
            return None
    column = rows_of(form, masks)
    if column is None or not same_lengths(column, tokens):
        return None
    column.row_lengths, column.folds = tokens.row_lengths, tokens
    return column
