// torch.autocast on the test device: the operations that compute in the lower precision, or in float32.
#include "values.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace at::autocast {  // as in ATen/autocast_mode.h, which includes all of ATen
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to, const Tensor& tensor, c10::DeviceType device_type);
}  // namespace at::autocast

namespace lagomtest {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType to) {
    c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
    for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
        (*stack)[i] = with_tensors((*stack)[i], [&](const at::Tensor& tensor) {
            return tensor.defined() ? at::autocast::cached_cast(to, tensor, kType) : tensor;
        });
    }
    op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    cast_and_call(op, stack, at::autocast::get_autocast_dtype(kType));
}

void in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_and_call(op, stack, at::kFloat); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
    for (const char* name : {
             "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
             "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linear", "addbmm",
             "baddbmm", "bmm", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
             "scaled_dot_product_attention",
         }) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
    }
    for (const char* name : {
             "exp", "log", "log1p", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "softplus", "layer_norm", "group_norm",
             "cosine_similarity", "nll_loss", "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss",
             "mse_loss", "binary_cross_entropy_with_logits", "cdist", "logsumexp", "prod", "softmax.int",
             "log_softmax.int", "cumsum", "sum", "sum.dim_IntList", "norm.Scalar", "norm.ScalarOpt_dim",
             "linalg_vector_norm",
         }) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
    }
}

}  // namespace
}  // namespace lagomtest
