/* UCX by hand, one put a block: what a library on top of UCX could reach without gathering.
 *
 * Built by `make peers` and loaded by ucx_driver.py. One process is one side; nothing here is thread-safe.
 * Every function returns 0, or a negative UCX status.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_mem_h blocks_memory, word_memory;
static ucp_ep_h endpoint;
static ucp_rkey_h blocks_key, word_key;
static uint64_t remote_blocks, remote_word, sent_word;
static volatile uint64_t* word;

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static int map(void* address, size_t size, ucp_mem_h* memory) {
  ucp_mem_map_params_t params = {
      .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
      .address = address,
      .length = size,
  };
  return ucp_mem_map(context, &params, memory);
}

int side_open(void* blocks, size_t size) {
  ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
  ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                       .thread_mode = UCS_THREAD_MODE_SINGLE};
  ucs_status_t status = ucp_init(&params, NULL, &context);
  if (status == UCS_OK) status = ucp_worker_create(context, &worker_params, &worker);
  if (status != UCS_OK) return status;
  word = aligned_alloc(4096, 4096);
  if (word == NULL) return UCS_ERR_NO_MEMORY;
  memset((void*)word, 0, 4096);
  status = map(blocks, size, &blocks_memory);
  return status == UCS_OK ? map((void*)word, 4096, &word_memory) : status;
}

uint64_t side_word(void) { return (uint64_t)(uintptr_t)word; }

/* `what` is 0 for the worker's address, 1 for the key of the blocks, 2 for that of the word. Returns the length. */
long side_pack(int what, void* out, size_t room) {
  ucp_address_t* address;
  void* packed;
  size_t size;
  ucs_status_t status;
  if (what == 0) {
    status = ucp_worker_get_address(worker, &address, &size);
    packed = address;
  } else {
    status = ucp_rkey_pack(context, what == 1 ? blocks_memory : word_memory, &packed, &size);
  }
  if (status != UCS_OK) return status;
  if (size <= room) memcpy(out, packed, size);
  if (what == 0) {
    ucp_worker_release_address(worker, address);
  } else {
    ucp_rkey_buffer_release(packed);
  }
  return size <= room ? (long)size : UCS_ERR_BUFFER_TOO_SMALL;
}

int side_connect(const void* address, const void* key_of_blocks, const void* key_of_word, uint64_t blocks,
                 uint64_t word_address) {
  ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = address};
  ucs_status_t status = ucp_ep_create(worker, &params, &endpoint);
  if (status == UCS_OK) status = ucp_ep_rkey_unpack(endpoint, key_of_blocks, &blocks_key);
  if (status == UCS_OK) status = ucp_ep_rkey_unpack(endpoint, key_of_word, &word_key);
  remote_blocks = blocks;
  remote_word = word_address;
  return status;
}

static int flush(double until) {
  ucp_request_param_t none = {0};
  ucs_status_ptr_t request = ucp_ep_flush_nbx(endpoint, &none);
  if (!UCS_PTR_IS_PTR(request)) return UCS_PTR_STATUS(request);
  ucs_status_t status;
  while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
    ucp_worker_progress(worker);
    if (now() > until) return UCS_ERR_TIMED_OUT;
  }
  ucp_request_free(request);
  return status;
}

static int put(const void* from, size_t size, uint64_t to, ucp_rkey_h key) {
  ucp_request_param_t none = {0};
  ucs_status_ptr_t request = ucp_put_nbx(endpoint, from, size, to, key, &none);
  if (!UCS_PTR_IS_PTR(request)) return UCS_PTR_STATUS(request);
  ucp_request_free(request); /* the flush waits for it, and reports for it */
  return UCS_OK;
}

int side_send(const char* blocks, const uint64_t* sources, const uint64_t* targets, size_t count, size_t size,
              uint64_t round, double seconds) {
  const double until = now() + seconds;
  int status = UCS_OK;
  for (size_t index = 0; index < count && status == UCS_OK; ++index) {
    status = put(blocks + sources[index], size, remote_blocks + targets[index], blocks_key);
    if (index % 256 == 255) ucp_worker_progress(worker);
  }
  if (status == UCS_OK) status = flush(until);
  sent_word = round;
  if (status == UCS_OK) status = put(&sent_word, sizeof sent_word, remote_word, word_key);
  return status == UCS_OK ? flush(until) : status;
}

int side_receive(uint64_t round, double seconds) {
  const double until = now() + seconds;
  while (*word != round) {
    ucp_worker_progress(worker);
    if (now() > until) return UCS_ERR_TIMED_OUT;
  }
  return UCS_OK;
}

/* TCP needs this side while the other one flushes. */
int side_progress(double seconds) {
  const double until = now() + seconds;
  while (now() < until) ucp_worker_progress(worker);
  return UCS_OK;
}
