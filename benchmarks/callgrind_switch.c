// Callgrind's client requests as functions, for benchmarks/callgrind_driver.py.
#include <valgrind/callgrind.h>

void start(void) { CALLGRIND_START_INSTRUMENTATION; }

// Writes what was counted since the last call under a name, and starts again from zero.
void dump(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
