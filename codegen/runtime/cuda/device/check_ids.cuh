// Whether ids lie in their table: one block, launched by apq_check_ids (run.c). The first check that finds
// some outside writes what it found; `found` is apq_found_ids, zero before.
extern "C" __global__ void __launch_bounds__(256)
apq_check_ids(const void *ids, long long wide, long long count, long long first, long long step, long long lowest,
              long long rows, long long number, long long *found) {
  __shared__ long long bad_of[256], least_of[256];
  long long bad = 0, least = count;
  for (long long i = first + threadIdx.x * step; i < count; i += 256 * step) {
    long long id = wide ? ((const long long *)ids)[i] : ((const int *)ids)[i];
    if (id < lowest || id >= rows) {
      bad++;
      least = i < least ? i : least;
    }
  }
  bad_of[threadIdx.x] = bad;
  least_of[threadIdx.x] = least;
  __syncthreads();
  if (threadIdx.x != 0 || found[0] != 0) return;
  for (int i = 1; i < 256; i++) {
    bad += bad_of[i];
    least = least_of[i] < least ? least_of[i] : least;
  }
  if (bad == 0) return;
  found[1] = bad;
  found[2] = least;
  found[3] = wide ? ((const long long *)ids)[least] : ((const int *)ids)[least];
  found[0] = number;
}
