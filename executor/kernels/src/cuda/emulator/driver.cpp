// A stand-in for NVIDIA's driver and NVRTC, for rehearsals of `tests/gpu.sh` and for tests of the
// real bindings. Device memory is the host's; kernels run in the emulator (`emulator.cpp`), which
// is loaded once for each precision from this library's folder.
//
// Work runs at once, in the order of the calls, except during capture. It enforces the driver's
// rules: copies stay inside allocations, a launch stays inside its limits, a captured stream is not
// waited for, and after an invalid access in a kernel every call fails. FORETELL_STAND_IN_FAULT
// names a kernel whose launches end so.
//
// `tests/gpu.sh rehearse` compiles it with -DSTAND_IN_DRIVER as libcuda.so.1, and with
// -DSTAND_IN_NVRTC as libnvrtc.so.13.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// What the stand-in for NVRTC makes of a source, instead of machine code.
static const char MAGIC[] = "foretell-emulated-precision-";

#ifdef STAND_IN_NVRTC

struct Program {
    std::string code;
};

extern "C" {
int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
int nvrtcCreateProgram(Program **program, const char *, const char *, int, const char *const *, const char *const *) {
    *program = new Program;
    return 0;
}
int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    const std::string prefix = "-DPRECISION=";
    for (int i = 0; i < count; i++) {
        if (std::string(options[i]).compare(0, prefix.size(), prefix) == 0) {
            program->code = MAGIC + std::string(options[i]).substr(prefix.size());
        }
    }
    return program->code.empty() ? 6 : 0;
}
int nvrtcGetProgramLogSize(Program *, size_t *size) {
    *size = 1;
    return 0;
}
int nvrtcGetProgramLog(Program *, char *log) {
    *log = 0;
    return 0;
}
int nvrtcGetCUBINSize(Program *program, size_t *size) {
    *size = program->code.size() + 1;
    return 0;
}
int nvrtcGetCUBIN(Program *program, char *code) {
    memcpy(code, program->code.c_str(), program->code.size() + 1);
    return 0;
}
int nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return 0;
}
}

#endif

#ifdef STAND_IN_DRIVER

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNJOINED = 904,
};

typedef int (*Emulate)(void *, const unsigned *, unsigned, unsigned, const void *);
typedef void *(*Find)(const char *);
struct Module {
    Emulate emulate;
    Find find;
    unsigned arguments_size;
};
struct Function {
    std::string name;
    void *kernel;
    const Module *module;
    unsigned max_dynamic;
};
typedef std::function<Result()> Work;
struct Graph {
    std::vector<Work> work;
};
struct Stream;
struct Capture {
    Stream *origin;
    std::vector<Stream *> streams, joined;
    Graph *graph;
    bool is_invalid;
};
struct Stream {
    Capture *capture = nullptr;
};
struct Event {
    Capture *capture = nullptr;
    // The streams whose captured work precedes the event.
    std::vector<Stream *> preceding;
    std::chrono::steady_clock::time_point time;
    bool has_happened = false;
};

static const size_t MEMORY = (size_t)16 << 30;
static const unsigned MAX_SHARED = 227 * 1024, DEFAULT_SHARED = 48 * 1024;
static std::recursive_mutex lock;
static std::map<uintptr_t, size_t> allocations;
static size_t allocated;
static Result sticky = SUCCESS;
static thread_local bool has_context;
static int context;
static Module modules[3];

// Checks the conditions of every call: a context on this thread, and no earlier invalid access.
#define ENTER()                                                                                                                   \
    std::lock_guard<std::recursive_mutex> guard(lock);                                                                            \
    if (sticky != SUCCESS) {                                                                                                      \
        return sticky;                                                                                                            \
    }                                                                                                                             \
    if (!has_context) {                                                                                                           \
        return INVALID_CONTEXT;                                                                                                   \
    }

static bool is_allocated(uintptr_t address, size_t bytes) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) {
        return false;
    }
    --next;
    return address + bytes <= next->first + next->second;
}

// Runs work, or adds it to the stream's capture.
static Result queue(Stream *stream, Work work) {
    if (!stream->capture) {
        const Result result = work();
        if (result != SUCCESS) {
            sticky = result;
        }
        return SUCCESS;
    }
    stream->capture->graph->work.push_back(work);
    return SUCCESS;
}

static bool contains(const std::vector<Stream *> &streams, const Stream *stream) {
    for (const Stream *one : streams) {
        if (one == stream) {
            return true;
        }
    }
    return false;
}

static bool load_module(int precision) {
    Module &module = modules[precision];
    if (module.emulate) {
        return true;
    }
    Dl_info own;
    if (!dladdr((void *)&is_allocated, &own)) {
        return false;
    }
    const std::string path = own.dli_fname;
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    void *library = dlopen((folder + "emulator-" + std::to_string(precision) + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "stand-in driver: %s\n", dlerror());
        return false;
    }
    module.emulate = (Emulate)dlsym(library, "foretell_emulate");
    module.find = (Find)dlsym(library, "foretell_find");
    module.arguments_size = ((unsigned (*)())dlsym(library, "foretell_arguments_size"))();
    return module.emulate && module.find;
}

extern "C" {
Result cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}
Result cuInit(unsigned) { return SUCCESS; }
Result cuGetErrorString(Result result, const char **text) {
    *text = result == ILLEGAL_ADDRESS      ? "an illegal memory access was encountered"
            : result == INVALID_VALUE       ? "invalid argument"
            : result == OUT_OF_MEMORY       ? "out of memory"
            : result == CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing"
            : result == CAPTURE_UNJOINED    ? "capture of a stream that did not join"
                                            : "stand-in error";
    return SUCCESS;
}
Result cuDeviceGetCount(int *count) {
    *count = 1;
    return SUCCESS;
}
Result cuDeviceGet(int *device, int index) {
    *device = index;
    return index == 0 ? SUCCESS : INVALID_VALUE;
}
Result cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 75: *value = 9; break; // compute capability, major
    case 76: *value = 0; break; // minor
    case 16: *value = 4; break; // multiprocessors
    case 97: *value = MAX_SHARED; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
Result cuDeviceGetName(char *name, int length, int) {
    snprintf(name, length, "stand-in for an NVIDIA H100");
    return SUCCESS;
}
Result cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = MEMORY;
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **result, int) {
    *result = &context;
    return SUCCESS;
}
Result cuCtxSetCurrent(void *given) {
    has_context = given == &context;
    return has_context ? SUCCESS : INVALID_CONTEXT;
}

Result cuModuleLoadData(const Module **module, const void *image) {
    ENTER();
    if (strncmp((const char *)image, MAGIC, strlen(MAGIC)) != 0) {
        return INVALID_VALUE;
    }
    const int precision = atoi((const char *)image + strlen(MAGIC));
    if (precision < 0 || precision > 2 || !load_module(precision)) {
        return INVALID_VALUE;
    }
    *module = &modules[precision];
    return SUCCESS;
}
Result cuModuleGetFunction(Function **function, const Module *module, const char *name) {
    ENTER();
    void *kernel = module->find(name);
    if (!kernel) {
        return NOT_FOUND;
    }
    *function = new Function{name, kernel, module, DEFAULT_SHARED};
    return SUCCESS;
}
Result cuFuncGetAttribute(int *value, int attribute, Function *) {
    ENTER();
    *value = 0;
    return attribute == 1 ? SUCCESS : INVALID_VALUE; // bytes of static shared memory
}
Result cuFuncSetAttribute(Function *function, int attribute, int value) {
    ENTER();
    if (attribute != 8 || value < 0 || (unsigned)value > MAX_SHARED) { // most bytes of dynamic shared memory
        return INVALID_VALUE;
    }
    function->max_dynamic = (unsigned)value;
    return SUCCESS;
}
Result cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                      unsigned shared, Stream *stream, void **parameters, void **extra) {
    ENTER();
    if (extra || !parameters || threads_y != 1 || threads_z != 1 || shared > function->max_dynamic) {
        return INVALID_VALUE;
    }
    std::vector<char> arguments((char *)parameters[0], (char *)parameters[0] + function->module->arguments_size);
    return queue(stream, [=]() {
        const char *fault = getenv("FORETELL_STAND_IN_FAULT");
        if (fault && function->name == fault) {
            return ILLEGAL_ADDRESS;
        }
        const unsigned grid[3] = {x, y, z};
        const int status = function->module->emulate(function->kernel, grid, threads, shared, arguments.data());
        return status == 0 ? SUCCESS : ILLEGAL_ADDRESS;
    });
}

Result cuMemAlloc_v2(uintptr_t *address, size_t bytes) {
    ENTER();
    if (bytes == 0) {
        return INVALID_VALUE;
    }
    if (allocated + bytes > MEMORY) {
        return OUT_OF_MEMORY;
    }
    void *memory = nullptr;
    if (posix_memalign(&memory, 256, bytes) != 0) {
        return OUT_OF_MEMORY;
    }
    if (bytes < (64 << 20)) {
        memset(memory, 0xFF, bytes);
    }
    *address = (uintptr_t)memory;
    allocations[*address] = bytes;
    allocated += bytes;
    return SUCCESS;
}
Result cuMemFree_v2(uintptr_t address) {
    ENTER();
    auto found = allocations.find(address);
    if (found == allocations.end()) {
        return INVALID_VALUE;
    }
    allocated -= found->second;
    allocations.erase(found);
    free((void *)address);
    return SUCCESS;
}
Result cuMemHostAlloc(void **pointer, size_t bytes, unsigned) {
    ENTER();
    *pointer = calloc(1, bytes);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFreeHost(void *pointer) {
    ENTER();
    free(pointer);
    return SUCCESS;
}
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER();
    *free_bytes = MEMORY - allocated;
    *total = MEMORY;
    return SUCCESS;
}
Result cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, Stream *stream) {
    ENTER();
    if (!is_allocated(to, bytes)) {
        return INVALID_VALUE;
    }
    return queue(stream, [=]() {
        memcpy((void *)to, from, bytes);
        return SUCCESS;
    });
}
Result cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, Stream *stream) {
    ENTER();
    if (!is_allocated(from, bytes)) {
        return INVALID_VALUE;
    }
    return queue(stream, [=]() {
        memcpy(to, (const void *)from, bytes);
        return SUCCESS;
    });
}
Result cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, Stream *stream) {
    ENTER();
    if (!is_allocated(to, bytes)) {
        return INVALID_VALUE;
    }
    return queue(stream, [=]() {
        memset((void *)to, value, bytes);
        return SUCCESS;
    });
}

Result cuStreamCreate(Stream **stream, unsigned) {
    ENTER();
    *stream = new Stream;
    return SUCCESS;
}
Result cuStreamSynchronize(Stream *stream) {
    ENTER();
    if (stream->capture) {
        stream->capture->is_invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}
Result cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    ENTER();
    if (event->capture) {
        Capture *capture = event->capture;
        if (!contains(capture->streams, stream)) {
            capture->streams.push_back(stream);
            stream->capture = capture;
        }
        if (stream == capture->origin) {
            capture->joined.insert(capture->joined.end(), event->preceding.begin(), event->preceding.end());
        }
        return SUCCESS;
    }
    if (stream->capture) {
        stream->capture->is_invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}
Result cuStreamBeginCapture_v2(Stream *stream, int) {
    ENTER();
    stream->capture = new Capture{stream, {stream}, {stream}, new Graph, false};
    return SUCCESS;
}
Result cuStreamEndCapture(Stream *stream, Graph **graph) {
    ENTER();
    Capture *capture = stream->capture;
    if (!capture || capture->origin != stream) {
        return INVALID_VALUE;
    }
    Result result = capture->is_invalid ? CAPTURE_INVALIDATED : SUCCESS;
    for (Stream *one : capture->streams) {
        one->capture = nullptr;
        if (!contains(capture->joined, one)) {
            result = result == SUCCESS ? CAPTURE_UNJOINED : result;
        }
    }
    *graph = result == SUCCESS ? capture->graph : nullptr;
    return result;
}

Result cuEventCreate(Event **event, unsigned) {
    ENTER();
    *event = new Event;
    return SUCCESS;
}
Result cuEventRecord(Event *event, Stream *stream) {
    ENTER();
    event->capture = stream->capture;
    event->preceding = {stream};
    if (!stream->capture) {
        event->time = std::chrono::steady_clock::now();
        event->has_happened = true;
    }
    return SUCCESS;
}
Result cuEventSynchronize(Event *event) {
    ENTER();
    return event->capture ? CAPTURE_UNSUPPORTED : SUCCESS;
}
Result cuEventElapsedTime_v2(float *milliseconds, const Event *start, const Event *end) {
    ENTER();
    if (!start->has_happened || !end->has_happened) {
        return NOT_READY;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return SUCCESS;
}

Result cuGraphInstantiateWithFlags(Graph **instance, const Graph *graph, unsigned long long) {
    ENTER();
    *instance = new Graph(*graph);
    return SUCCESS;
}
Result cuGraphDestroy(Graph *graph) {
    delete graph;
    return SUCCESS;
}
Result cuGraphLaunch(const Graph *graph, Stream *stream) {
    ENTER();
    for (const Work &work : graph->work) {
        const Result result = queue(stream, work);
        if (result != SUCCESS) {
            return result;
        }
    }
    return sticky;
}
Result cuGraphExecDestroy(Graph *graph) {
    delete graph;
    return SUCCESS;
}
}

#endif
