/* The number of layers whose KV has arrived: raised by one thread, waited on by another without spinning. */
#ifndef TS_READY_H
#define TS_READY_H

#include <stdint.h>

/* Return once *layers_ready > layer; NULL: at once. */
void ts_wait_layer(const int32_t *layers_ready, int32_t layer);

#endif
