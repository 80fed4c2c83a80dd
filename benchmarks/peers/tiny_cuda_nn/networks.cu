// Fully connected networks of tiny-cuda-nn in f16 behind a C interface, for `Library` beside this file.
//
// Every function gives 0, or says by tcnn_error() what went wrong. Memory is the caller's, on the GPU; x and y are
// (rows, width) row-major, or (width, rows) where `transposed` is set, as tiny-cuda-nn wants them for its JIT.

#include <tiny-cuda-nn/common_device.h>
#include <tiny-cuda-nn/gpu_matrix.h>
#include <tiny-cuda-nn/network.h>

#include <cstdint>
#include <memory>
#include <string>

using namespace tcnn;
using half_t = network_precision_t;
static_assert(sizeof(half_t) == 2, "build with TCNN_HALF_PRECISION");

namespace {

thread_local std::string last_error;

struct Held {
  std::unique_ptr<Network<half_t>> network;
  GPUMemory<half_t> parameters, gradients;
  ScopeGuard layout;  // of parameters, as the JIT wants them: converted once, not in every call
  bool jit = false;
};

template <typename F>
int guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace

extern "C" const char* tcnn_error() { return last_error.c_str(); }

// `layers` products of width by width without biases, an activation behind each, the last included.
extern "C" int tcnn_make(void** out, int width, int layers, const char* activation, const char* kind, int jit) {
  return guarded([&] {
    auto held = std::make_unique<Held>();
    held->network.reset(create_network<half_t>({
        {"otype", kind},
        {"n_input_dims", width},
        {"n_output_dims", width},
        {"n_neurons", width},
        {"n_hidden_layers", layers - 1},
        {"activation", activation},
        {"output_activation", activation},
    }));
    held->parameters.resize(held->network->n_params());
    held->gradients.resize(held->network->n_params());
    held->network->set_params(held->parameters.data(), held->parameters.data(), held->gradients.data());
    held->jit = jit != 0;
    *out = held.release();
  });
}

extern "C" int64_t tcnn_parameters(void* net) {
  return static_cast<int64_t>(static_cast<Held*>(net)->network->n_params());
}

// Weights (layers, width, width), each (outputs, inputs) row-major.
extern "C" int tcnn_set(void* net, void* stream, const void* weights) {
  return guarded([&] {
    auto* held = static_cast<Held*>(net);
    auto s = static_cast<cudaStream_t>(stream);
    const size_t bytes = held->network->n_params() * sizeof(half_t);
    CUDA_CHECK_THROW(cudaMemcpyAsync(held->parameters.data(), weights, bytes, cudaMemcpyDeviceToDevice, s));
    if (held->jit) {
      held->network->set_jit_fusion(true);
      held->layout = held->network->jit_guard(s, true);
    }
    CUDA_CHECK_THROW(cudaStreamSynchronize(s));
  });
}

extern "C" int tcnn_infer(void* net, void* stream, const void* x, void* y, uint32_t rows, int transposed) {
  return guarded([&] {
    auto* held = static_cast<Held*>(net);
    auto& network = *held->network;
    const MatrixLayout layout = transposed ? RM : CM;
    GPUMatrixDynamic<half_t> in(static_cast<half_t*>(const_cast<void*>(x)), network.input_width(), rows, layout);
    GPUMatrixDynamic<half_t> out(static_cast<half_t*>(y), network.padded_output_width(), rows, layout);
    network.inference_mixed_precision(static_cast<cudaStream_t>(stream), in, out);
    if (held->jit && !network.jit_fusion()) {
      throw std::runtime_error{"the JIT was given up"};
    }
  });
}

extern "C" void tcnn_free(void* net) { delete static_cast<Held*>(net); }
