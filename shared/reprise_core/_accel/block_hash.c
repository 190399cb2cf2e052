/* Block hashes of a whole prompt in one call: the compiled twin of block_encoding.py.
 *
 * Both serialise (parent hash, token ids, extra keys) per block and digest the bytes; the suffix of the
 * extra keys comes ready from Python. Whatever this module does not take, it answers with None, and
 * the Python twin does it (and says what is wrong, if something is): ids that are not exact,
 * non-negative ints below 2^64, and pickle bodies of more than one frame.
 *
 * The digests are those that Python itself uses: SHA-256 of the libcrypto behind `_hashlib`, XXH3-128
 * of the `xxhash` package. They are looked up in those extension modules by `load`, so that no header
 * and no library is needed to build.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>

enum form { FORM_PICKLE = 0, FORM_CBOR = 1 };
enum digest { DIGEST_SHA256 = 0, DIGEST_XXH3 = 1 };

#define MAX_ID_NBYTES 11        /* LONG1, length, 9 bytes; CBOR takes 9 */
#define MAX_OPENING_NBYTES 128  /* frame, heads and parent */
#define PICKLE_FRAME_LIMIT 65536
#define PICKLE_FRAME_HEAD 11    /* PROTO 5, FRAME, length of 8 */
#define PREFETCH_BLOCKS 2

/* Stable ABI of libcrypto; its context takes 112 bytes. */
typedef union { unsigned char room[256]; uint64_t align; } sha256_context;
static int (*sha256_init)(void *);
static int (*sha256_update)(void *, const void *, size_t);
static int (*sha256_final)(unsigned char *, void *);

/* Stable ABI of xxHash since 0.8. */
typedef struct { uint64_t low64, high64; } xxh128;
static xxh128 (*xxh3_128bits)(const void *, size_t);

static unsigned char *put_big_endian(unsigned char *out, uint64_t value, int nbytes)
{
    for (int shift = 8 * (nbytes - 1); shift >= 0; shift -= 8)
        *out++ = (unsigned char)(value >> shift);
    return out;
}

static unsigned char *put_little_endian(unsigned char *out, uint64_t value, int nbytes)
{
    for (int index = 0; index < nbytes; index++, value >>= 8)
        *out++ = (unsigned char)value;
    return out;
}

/* A CBOR head in its shortest form. */
static inline unsigned char *put_cbor_head(unsigned char *out, unsigned char major, uint64_t value)
{
    if (value < 24) {
        *out++ = major | (unsigned char)value;
        return out;
    }
    if (value < 0x100) {
        *out++ = major | 24;
        return put_big_endian(out, value, 1);
    }
    if (value < 0x10000) {
        *out++ = major | 25;
        return put_big_endian(out, value, 2);
    }
    if (value < 0x100000000) {
        *out++ = major | 26;
        return put_big_endian(out, value, 4);
    }
    *out++ = major | 27;
    return put_big_endian(out, value, 8);
}

/* An id below 2^32 without a branch on its width, which no processor predicts. Writes 5 bytes. */
static inline unsigned char *put_cbor_narrow(unsigned char *out, uint32_t value)
{
    static const unsigned char leads[4] = {0, 24, 25, 26}, lengths[4] = {1, 2, 3, 5}, shifts[4] = {24, 24, 16, 0};
    int width = (value > 0x17) + (value > 0xff) + (value > 0xffff);
    uint32_t shifted = value << shifts[width];
    out[0] = (unsigned char)(width ? leads[width] : value);
    out[1] = (unsigned char)(shifted >> 24);
    out[2] = (unsigned char)(shifted >> 16);
    out[3] = (unsigned char)(shifted >> 8);
    out[4] = (unsigned char)shifted;
    return out + lengths[width];
}

/* The same for an id below 2^31. */
static inline unsigned char *put_pickle_narrow(unsigned char *out, uint32_t value)
{
    static const unsigned char opcodes[3] = {'K', 'M', 'J'}, lengths[3] = {2, 3, 5};
    int width = (value > 0xff) + (value > 0xffff);
    out[0] = opcodes[width];
    out[1] = (unsigned char)value;
    out[2] = (unsigned char)(value >> 8);
    out[3] = (unsigned char)(value >> 16);
    out[4] = (unsigned char)(value >> 24);
    return out + lengths[width];
}

static inline unsigned char *put_pickle_int(unsigned char *out, uint64_t value)
{
    if (value < 0x100) {
        *out++ = 'K';
        return put_little_endian(out, value, 1);
    }
    if (value < 0x10000) {
        *out++ = 'M';
        return put_little_endian(out, value, 2);
    }
    if (value < 0x80000000) {
        *out++ = 'J';
        return put_little_endian(out, value, 4);
    }
    /* LONG1: two's complement in as few bytes as keep the sign bit 0. */
    int nbytes = 1;
    while (nbytes < 9 && value >> (8 * nbytes - 1))
        nbytes++;
    *out++ = 0x8a;
    *out++ = (unsigned char)nbytes;
    out = put_little_endian(out, value, nbytes < 8 ? nbytes : 8);
    if (nbytes == 9)
        *out++ = 0;
    return out;
}

/* The value of an int below 2^64; 0 and *taken = 0 for others. No exception is left set. */
static inline uint64_t id_value(PyObject *id, int *taken)
{
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)id)) {
        Py_ssize_t value = PyUnstable_Long_CompactValue((PyLongObject *)id);
        *taken = value >= 0;
        return (uint64_t)value;
    }
#else
    if (Py_SIZE(id) == 1) {
        *taken = 1;
        return ((PyLongObject *)id)->ob_digit[0];
    }
#endif
    uint64_t value = PyLong_AsUnsignedLongLong(id);
    *taken = 1;
    if (value == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        *taken = 0;
    }
    return value;
}

/* The ids of one block; NULL when one of them is not taken. */
static inline unsigned char *put_ids(unsigned char *out, enum form form, PyObject **ids, Py_ssize_t count)
{
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *id = ids[index];
        int taken;
        if (!PyLong_CheckExact(id))
            return NULL;
        uint64_t value = id_value(id, &taken);
        if (!taken)
            return NULL;
        if (value < 0x80000000)
            out = form == FORM_CBOR ? put_cbor_narrow(out, (uint32_t)value) : put_pickle_narrow(out, (uint32_t)value);
        else
            out = form == FORM_CBOR ? put_cbor_head(out, 0x00, value) : put_pickle_int(out, value);
    }
    return out;
}

static unsigned char *put_tuple(unsigned char *out, enum form form, PyObject **ids, Py_ssize_t count)
{
    if (form == FORM_CBOR)
        return put_ids(put_cbor_head(out, 0x80, (uint64_t)count), form, ids, count);
    if (count > 3)
        *out++ = '(';
    out = put_ids(out, form, ids, count);
    if (out != NULL)
        *out++ = count > 3 ? 't' : (unsigned char)(0x84 + count);
    return out;
}

static unsigned char *put_parent(unsigned char *out, enum form form, const unsigned char *parent, size_t nbytes)
{
    if (form == FORM_CBOR) {
        out = put_cbor_head(put_cbor_head(out, 0x80, 3), 0x40, nbytes);
    } else {
        *out++ = 'C';
        *out++ = (unsigned char)nbytes;
    }
    memcpy(out, parent, nbytes);
    out += nbytes;
    if (form == FORM_PICKLE)
        *out++ = 0x94;
    return out;
}

/* The message of one block, written to `buffer`; its length, or 0 when it is not taken. */
static size_t put_message(unsigned char *buffer, enum form form, const unsigned char *parent, size_t parent_nbytes,
                          PyObject **ids, Py_ssize_t count, const char *suffix, size_t suffix_nbytes)
{
    unsigned char *body = form == FORM_PICKLE ? buffer + PICKLE_FRAME_HEAD : buffer;
    unsigned char *out = put_tuple(put_parent(body, form, parent, parent_nbytes), form, ids, count);
    if (out == NULL)
        return 0;
    memcpy(out, suffix, suffix_nbytes);
    out += suffix_nbytes;
    if (form == FORM_PICKLE) {
        size_t body_nbytes = (size_t)(out - body);
        if (body_nbytes >= PICKLE_FRAME_LIMIT)
            return 0;
        buffer[0] = 0x80;
        buffer[1] = 5;
        buffer[2] = 0x95;
        put_little_endian(buffer + 3, body_nbytes, 8);
    }
    return (size_t)(out - buffer);
}

static PyObject *digest_message(enum digest digest, const unsigned char *message, size_t nbytes)
{
    unsigned char result[32];
    if (digest == DIGEST_XXH3) {
        xxh128 hash = xxh3_128bits(message, nbytes);
        put_big_endian(put_big_endian(result, hash.high64, 8), hash.low64, 8);
        return PyBytes_FromStringAndSize((char *)result, 16);
    }
    sha256_context context;
    sha256_init(&context);
    sha256_update(&context, message, nbytes);
    sha256_final(result, &context);
    return PyBytes_FromStringAndSize((char *)result, 32);
}

/* The longest suffix, or -1 with an exception; `suffixes` is one bytes object or a list of num_blocks. */
static Py_ssize_t longest_suffix(PyObject *suffixes, Py_ssize_t num_blocks)
{
    if (PyBytes_Check(suffixes))
        return PyBytes_GET_SIZE(suffixes);
    if (!PyList_Check(suffixes) || PyList_GET_SIZE(suffixes) != num_blocks) {
        PyErr_SetString(PyExc_TypeError, "suffixes must be bytes, or a list with one bytes object per block");
        return -1;
    }
    Py_ssize_t longest = 0;
    for (Py_ssize_t index = 0; index < num_blocks; index++) {
        PyObject *suffix = PyList_GET_ITEM(suffixes, index);
        if (!PyBytes_Check(suffix)) {
            PyErr_SetString(PyExc_TypeError, "a suffix must be bytes");
            return -1;
        }
        if (PyBytes_GET_SIZE(suffix) > longest)
            longest = PyBytes_GET_SIZE(suffix);
    }
    return longest;
}

/* A long prompt's int objects are not in the nearest cache; ask for them some blocks ahead. */
static inline void prefetch_ids(PyObject **ids, Py_ssize_t first, Py_ssize_t count, Py_ssize_t end)
{
#if defined(__GNUC__)
    for (Py_ssize_t index = first; index < first + count && index < end; index++)
        __builtin_prefetch(ids[index]);
#endif
}

/* The list of hashes; NULL without an exception when a block is not taken. */
static PyObject *hash_each(enum form form, enum digest digest, PyObject *parent, PyObject **ids,
                           Py_ssize_t num_blocks, Py_ssize_t block_size, PyObject *suffixes, unsigned char *buffer)
{
    PyObject *hashes = PyList_New(num_blocks);
    if (hashes == NULL)
        return NULL;
    for (Py_ssize_t index = 0; index < num_blocks; index++) {
        PyObject *suffix = PyBytes_Check(suffixes) ? suffixes : PyList_GET_ITEM(suffixes, index);
        prefetch_ids(ids, (index + PREFETCH_BLOCKS) * block_size, block_size, num_blocks * block_size);
        size_t nbytes = put_message(buffer, form, (unsigned char *)PyBytes_AS_STRING(parent),
                                    (size_t)PyBytes_GET_SIZE(parent), ids + index * block_size, block_size,
                                    PyBytes_AS_STRING(suffix), (size_t)PyBytes_GET_SIZE(suffix));
        PyObject *hash = nbytes ? digest_message(digest, buffer, nbytes) : NULL;
        if (hash == NULL) {
            Py_DECREF(hashes);
            return NULL;
        }
        PyList_SET_ITEM(hashes, index, hash);
        parent = hash;
    }
    return hashes;
}

static PyObject *hash_blocks(PyObject *module, PyObject *args)
{
    int form, digest;
    PyObject *parent, *token_ids, *suffixes;
    Py_ssize_t num_blocks, block_size;
    if (!PyArg_ParseTuple(args, "iiSOnnO", &form, &digest, &parent, &token_ids, &num_blocks, &block_size, &suffixes))
        return NULL;
    if (!PyList_Check(token_ids) && !PyTuple_Check(token_ids)) {
        PyErr_SetString(PyExc_TypeError, "token_ids must be a list or a tuple");
        return NULL;
    }
    if (num_blocks < 0 || block_size < 1 || PyBytes_GET_SIZE(parent) > 64 || (digest == DIGEST_XXH3 ? !xxh3_128bits : !sha256_init)
        || num_blocks > PySequence_Fast_GET_SIZE(token_ids) / block_size) {
        PyErr_SetString(PyExc_ValueError, "no such digest, or sizes that do not fit");
        return NULL;
    }
    Py_ssize_t suffix_nbytes = longest_suffix(suffixes, num_blocks);
    if (suffix_nbytes < 0)
        return NULL;
    if (block_size > (PY_SSIZE_T_MAX - MAX_OPENING_NBYTES - suffix_nbytes) / MAX_ID_NBYTES)
        return PyErr_NoMemory();
    unsigned char *buffer = PyMem_Malloc((size_t)(MAX_OPENING_NBYTES + suffix_nbytes + block_size * MAX_ID_NBYTES));
    if (buffer == NULL)
        return PyErr_NoMemory();
    PyObject *hashes = hash_each((enum form)form, (enum digest)digest, parent, PySequence_Fast_ITEMS(token_ids),
                                 num_blocks, block_size, suffixes, buffer);
    PyMem_Free(buffer);
    if (hashes == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return hashes;
}

/* load(path of _hashlib, path of xxhash._xxhash) -> (has SHA-256, has XXH3-128) */
static PyObject *load(PyObject *module, PyObject *args)
{
    const char *hashlib_path, *xxhash_path;
    if (!PyArg_ParseTuple(args, "ss", &hashlib_path, &xxhash_path))
        return NULL;
    void *hashlib = dlopen(hashlib_path, RTLD_NOW | RTLD_LOCAL);
    if (hashlib != NULL) {
        /* Also finds symbols of the libraries that the module was linked with. */
        *(void **)&sha256_update = dlsym(hashlib, "SHA256_Update");
        *(void **)&sha256_final = dlsym(hashlib, "SHA256_Final");
        *(void **)&sha256_init = sha256_update && sha256_final ? dlsym(hashlib, "SHA256_Init") : NULL;
    }
    void *xxhash = dlopen(xxhash_path, RTLD_NOW | RTLD_LOCAL);
    if (xxhash != NULL)
        *(void **)&xxh3_128bits = dlsym(xxhash, "XXH3_128bits");
    return Py_BuildValue("OO", sha256_init ? Py_True : Py_False, xxh3_128bits ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"hash_blocks", hash_blocks, METH_VARARGS,
     "hash_blocks(form, digest, parent, token_ids, num_blocks, block_size, suffixes) -> list[bytes] | None"},
    {"load", load, METH_VARARGS, "load(hashlib_path, xxhash_path) -> tuple[bool, bool]"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_block_hash", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__block_hash(void)
{
    return PyModule_Create(&definition);
}
