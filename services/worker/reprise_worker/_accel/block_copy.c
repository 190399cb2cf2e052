/* Blocks out of shared memory into the cache, checked, many in one call and without the GIL: the compiled
 * twin of block_fills' own way (block_codec's check_header, a copy, check_payload).
 *
 * It only says which blocks are right. What is wrong with another one, its Python twin finds out and says.
 *
 * XXH3-64 is that of the `xxhash` package, looked up in its extension module by `load`, so that no header
 * and no library is needed to build.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define FIELDS_NBYTES 56
#define HEADER_NBYTES 64

/* Stable ABI of xxHash since 0.8. */
static void *(*xxh3_create)(void);
static int (*xxh3_free)(void *);
static int (*xxh3_reset)(void *);
static int (*xxh3_update)(void *, const void *, size_t);
static uint64_t (*xxh3_digest)(const void *);

typedef struct {
    uint64_t offset, nbytes, block_id;
    const unsigned char *hash;
    Py_ssize_t hash_nbytes;
} block;

typedef struct {
    const unsigned char *memory;
    uint64_t memory_nbytes;
    unsigned char *cache;
    uint64_t block_nbytes, num_blocks;
    const unsigned char *fields;
} job;

static uint64_t from_little_endian(const unsigned char *bytes)
{
    uint64_t value = 0;
    for (int index = 7; index >= 0; index--)
        value = value << 8 | bytes[index];
    return value;
}

/* The header is read once and the checksum is that of the copy: whoever owns the memory may change it meanwhile. */
static int copy_block(const job *job, const block *block, void *state)
{
    if (block->block_id >= job->num_blocks || block->nbytes != HEADER_NBYTES + job->block_nbytes
        || block->nbytes > job->memory_nbytes || block->offset > job->memory_nbytes - block->nbytes)
        return 0;
    unsigned char header[HEADER_NBYTES];
    const unsigned char *source = job->memory + block->offset;
    memcpy(header, source, HEADER_NBYTES);
    if (memcmp(header, job->fields, FIELDS_NBYTES) != 0)
        return 0;
    source += HEADER_NBYTES;
    unsigned char *target = job->cache + block->block_id * job->block_nbytes;
    xxh3_reset(state);
    xxh3_update(state, block->hash, (size_t)block->hash_nbytes);
    xxh3_update(state, header, FIELDS_NBYTES);
    memcpy(target, source, (size_t)job->block_nbytes);
    xxh3_update(state, target, (size_t)job->block_nbytes);
    return xxh3_digest(state) == from_little_endian(header + FIELDS_NBYTES);
}

static int read_block(PyObject *item, block *out)
{
    unsigned long long offset, nbytes, block_id;
    const char *hash;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a block must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "KKKy#", &offset, &nbytes, &block_id, &hash, &out->hash_nbytes))
        return -1;
    out->offset = offset;
    out->nbytes = nbytes;
    out->block_id = block_id;
    out->hash = (const unsigned char *)hash;
    return 0;
}

static PyObject *copy_blocks(PyObject *module, PyObject *args)
{
    unsigned long long memory, memory_nbytes, cache, block_nbytes, num_blocks;
    const char *fields;
    Py_ssize_t fields_nbytes;
    PyObject *items;
    if (!PyArg_ParseTuple(args, "KKKKKy#O!", &memory, &memory_nbytes, &cache, &block_nbytes, &num_blocks,
                          &fields, &fields_nbytes, &PyTuple_Type, &items))
        return NULL;
    if (fields_nbytes != FIELDS_NBYTES || xxh3_update == NULL) {
        PyErr_SetString(PyExc_ValueError, "the fields of a header are 56 bytes, and the digest must be loaded");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    PyObject *right = PyBytes_FromStringAndSize(NULL, count);
    block *blocks = PyMem_Calloc((size_t)(count ? count : 1), sizeof(block));
    void *state = xxh3_create();
    if (right == NULL || blocks == NULL || state == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t index = 0; index < count; index++)
        if (read_block(PyTuple_GET_ITEM(items, index), &blocks[index]) < 0)
            goto fail;
    const job job = {(const unsigned char *)(uintptr_t)memory, memory_nbytes, (unsigned char *)(uintptr_t)cache,
                     block_nbytes, num_blocks, (const unsigned char *)fields};
    char *flags = PyBytes_AS_STRING(right);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t index = 0; index < count; index++)
        flags[index] = (char)copy_block(&job, &blocks[index], state);
    Py_END_ALLOW_THREADS
    xxh3_free(state);
    PyMem_Free(blocks);
    return right;
fail:
    if (state != NULL)
        xxh3_free(state);
    PyMem_Free(blocks);
    Py_XDECREF(right);
    return NULL;
}

/* load(path of xxhash._xxhash) -> whether the digest was found */
static PyObject *load(PyObject *module, PyObject *args)
{
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    void *xxhash = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (xxhash == NULL)
        Py_RETURN_FALSE;
    *(void **)&xxh3_create = dlsym(xxhash, "XXH3_createState");
    *(void **)&xxh3_free = dlsym(xxhash, "XXH3_freeState");
    *(void **)&xxh3_reset = dlsym(xxhash, "XXH3_64bits_reset");
    *(void **)&xxh3_digest = dlsym(xxhash, "XXH3_64bits_digest");
    /* The one that knows the processor, where there is one. */
    void *update = dlsym(xxhash, "XXH3_64bits_update_dispatch");
    if (update == NULL)
        update = dlsym(xxhash, "XXH3_64bits_update");
    *(void **)&xxh3_update = xxh3_create && xxh3_free && xxh3_reset && xxh3_digest ? update : NULL;
    return PyBool_FromLong(xxh3_update != NULL);
}

static PyMethodDef methods[] = {
    {"copy_blocks", copy_blocks, METH_VARARGS,
     "copy_blocks(memory, memory_nbytes, cache, block_nbytes, num_blocks, fields, blocks) -> bytes"},
    {"load", load, METH_VARARGS, "load(xxhash_path) -> bool"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_block_copy", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__block_copy(void)
{
    return PyModule_Create(&definition);
}
