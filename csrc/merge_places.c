/* Where the threads of a merge run on a machine with several memory nodes; must not start any.
 *
 * Off unless somebody asks for it: a thread that may run anywhere is best where the others leave
 * room. With it thread i of every team keeps to the cores of the same node and takes the same blocks
 * in every merge (merge_threads.c), so a page lies where the thread runs that has written it first.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_setaffinity */
#endif
#include "merge_internal.h"

#ifdef __linux__
#include <sched.h>

static cpu_set_t places[SM_PLACES_MAX];
static int place_count;
static _Thread_local int place_of; /* one more than where this thread is */

void sm_places_clear(void) { place_count = 0; }

int sm_place_add(const int *cores, size_t count) {
    cpu_set_t *place = &places[place_count];
    int any = 0;
    if (place_count == SM_PLACES_MAX) return 0;
    CPU_ZERO(place);
    for (size_t i = 0; i < count; i++) {
        if (cores[i] < 0 || cores[i] >= CPU_SETSIZE) continue;
        CPU_SET((size_t)cores[i], place);
        any = 1;
    }
    place_count += any;
    return any;
}

int sm_placed(void) { return place_count > 1; }

void sm_take_place(int thread, int threads) {
    int place = (int)((long)thread * place_count / threads);
    if (place_of == place + 1) return;
    place_of = place + 1;
    (void)sched_setaffinity(0, sizeof(cpu_set_t), &places[place]); /* slower without, not wrong */
}

#else
void sm_places_clear(void) {}
int sm_place_add(const int *cores, size_t count) { return (void)cores, (void)count, 0; }
int sm_placed(void) { return 0; }
void sm_take_place(int thread, int threads) { (void)thread, (void)threads; }
#endif
