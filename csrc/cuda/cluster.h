// Whether there are clusters of thread blocks.
#pragma once

namespace fp8core {

// Whether the code that runs on the device was compiled for clusters: from compute capability 9.0
// on, which a later device need not have been given.
bool has_clusters(int device);

}  // namespace fp8core
