// Operations of the test device: a few of its own, a fallback that runs each other one by the CPU's kernel, and
// autocast, which would take as long to compile by itself.
#include "device.hpp"
#include "values.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/copy_ops.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace at::autocast {  // as in ATen/autocast_mode.h, which includes all of ATen
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to, const Tensor& tensor, c10::DeviceType device_type);
}  // namespace at::autocast

namespace lagomtest {
namespace {

const c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
// The CPU's key, which is never chosen beside the other, makes it a kind of which Module.to keeps the parameters, as of
// CUDA's, XPU's and HPU's: torch makes new parameters for one that it knows by PrivateUse1 alone.
const c10::DispatchKeySet kDevice({c10::DispatchKey::PrivateUse1, c10::DispatchKey::CPU});

// Calls a kernel of the CPU without autograd, and without the modes that have seen the operation already.
struct BelowModes {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard modes{c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize})};
};

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// What a view does not have of the tensor that it is a view of.
const c10::DispatchKeySet kNotKept(
    {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Conjugate,
     c10::DispatchKey::Negative});

void take_layout(const at::Tensor& tensor, const at::Tensor& of) {
    tensor.unsafeGetTensorImpl()->set_storage_offset(of.storage_offset());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides());
    if (of.is_conj()) tensor._set_conj(true);  // views such as conj().imag, which copies have to resolve
    if (of.is_neg()) tensor._set_neg(true);
}

at::Tensor with_layout(const at::Tensor& of, c10::Storage storage, c10::DispatchKeySet keys) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, of.dtype());
    take_layout(tensor, of);
    return tensor;
}

// Tensors of the CPU that see the memory of the device's tensors. One storage has one alias.
class Aliases {
public:
    at::Tensor of(const at::Tensor& tensor) {
        if (!is_ours(tensor)) {
            if (tensor.defined()) inputs_.insert(tensor.unsafeGetTensorImpl());
            return tensor;
        }
        TORCH_CHECK(tensor.layout() == c10::kStrided, "lagomtest has strided tensors only");
        auto* impl = tensor.unsafeGetTensorImpl();
        if (auto found = tensors_.find(impl); found != tensors_.end()) return found->second.alias;
        auto alias = with_layout(tensor, storage_of(tensor.storage()), kCpu);
        if (impl->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
        tensors_.emplace(impl, Pair{tensor, alias});
        originals_.emplace(alias.unsafeGetTensorImpl(), tensor);
        return alias;
    }

    // The device's tensor for a result of the CPU's kernel: an argument, a view of one, or a new one.
    at::Tensor back(const at::Tensor& result, c10::DeviceIndex index) {
        if (!result.defined() || inputs_.count(result.unsafeGetTensorImpl()) != 0) return result;
        if (auto found = originals_.find(result.unsafeGetTensorImpl()); found != originals_.end()) return found->second;
        TORCH_CHECK(result.layout() == c10::kStrided, "lagomtest has strided tensors only");
        if (auto found = storages_.find(result.storage().unsafeGetStorageImpl()); found != storages_.end()) {
            return view(result, found->second);
        }
        return with_layout(result, taken_over(result.storage(), index), kDevice);
    }

    // Gives the arguments what the kernel has changed in their aliases: sizes, and memory that has grown.
    void update() {
        for (auto& [impl, pair] : tensors_) {
            auto& [original, alias] = pair;
            auto* from = alias.storage().unsafeGetStorageImpl();
            auto* to = original.storage().unsafeGetStorageImpl();
            if (storages_.count(from) != 0 && from->data() != to->data()) {
                const size_t size = from->nbytes();
                to->set_data_ptr_noswap(adopt(from->set_data_ptr(c10::DataPtr()), size, original.device().index()));
                to->set_nbytes(size);
            }
            if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
                alias.storage_offset() != original.storage_offset()) {
                original.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
                original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
            }
        }
    }

private:
    struct Pair {
        at::Tensor original, alias;
    };

    // A view of an argument counts the argument's versions, unless both are inference tensors.
    at::Tensor view(const at::Tensor& result, const c10::Storage& storage) {
        c10::DispatchKeySet keys = kDevice;
        for (auto& [impl, pair] : tensors_) {
            if (impl->storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) keys = impl->key_set() - kNotKept;
        }
        auto tensor = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(storage), keys, result.dtype());
        take_layout(tensor, result);
        return tensor;
    }

    c10::Storage storage_of(const c10::Storage& original) {
        auto& alias = aliases_[original.unsafeGetStorageImpl()];
        if (!alias) {
            auto* holder = new c10::Storage(original);
            c10::DataPtr data(
                original.unsafeGetStorageImpl()->mutable_data(), holder,
                [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::Device(c10::DeviceType::CPU));
            alias = c10::Storage(
                c10::Storage::use_byte_size_t(), original.nbytes(), std::move(data),
                c10::GetAllocator(c10::DeviceType::CPU), true);
            storages_.emplace(alias.unsafeGetStorageImpl(), original);
        }
        return alias;
    }

    c10::Storage taken_over(const c10::Storage& result, c10::DeviceIndex index) {
        auto& taken = taken_[result.unsafeGetStorageImpl()];
        if (!taken) {
            const size_t size = result.nbytes();
            auto* impl = result.unsafeGetStorageImpl();
            c10::DataPtr memory;
            if (result.use_count() == 1 && impl->resizable()) {
                memory = adopt(impl->set_data_ptr(c10::DataPtr()), size, index);
            } else {  // others see it
                c10::DeviceGuard guard(c10::Device(kType, index));
                memory = device_allocator()->allocate(size);
                if (size > 0) std::memcpy(memory.get(), impl->data(), size);
            }
            taken = c10::Storage(
                c10::Storage::use_byte_size_t(), size, std::move(memory), device_allocator(), true);
        }
        return taken;
    }

    std::unordered_map<c10::TensorImpl*, Pair> tensors_;
    std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
    std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_, storages_, taken_;
    std::unordered_set<c10::TensorImpl*> inputs_;  // numbers of the CPU
};

bool is_index_operation(const c10::OperatorName& name) {
    const auto& text = name.name;
    return text == "aten::index" || text == "aten::index_put_" || text == "aten::_index_put_impl_" ||
           text == "aten::index_put" || text == "aten::_unsafe_index" || text == "aten::_unsafe_index_put";
}

// The device of an operation's tensors; refuses those that are elsewhere, as CUDA does.
class OneDevice {
public:
    explicit OneDevice(const c10::OperatorHandle& op) : op_(op) {}

    void add(const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        if (!is_ours(tensor)) {
            if (tensor.dim() > 0 && !is_index_operation(op_.operator_name())) other_ = tensor.device();
        } else if (!index_) {
            index_ = tensor.device().index();
        } else if (*index_ != tensor.device().index() && tensor.dim() > 0) {
            other_ = tensor.device();
        }
    }
    void add(c10::Device device) {
        if (device.type() == kType && !index_) index_ = device.has_index() ? device.index() : current_device();
    }
    c10::DeviceIndex check() const {
        const c10::DeviceIndex index = index_.value_or(current_device());
        TORCH_CHECK(
            !other_, "Expected all tensors to be on the same device, but found at least two devices, ",
            c10::Device(kType, index), " and ", *other_, "! (when checking arguments for ", op_.operator_name(), ")");
        return index;
    }

private:
    const c10::OperatorHandle& op_;
    std::optional<c10::DeviceIndex> index_;
    std::optional<c10::Device> other_;
};

bool takes_generator(const c10::Argument& argument) {
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    return type->kind() == c10::TypeKind::GeneratorType;
}

bool is_view(const c10::FunctionSchema& schema) {
    if (schema.returns().empty()) return false;
    for (const auto& result : schema.returns()) {
        if (result.alias_info() == nullptr || result.alias_info()->isWrite()) return false;
    }
    return true;
}

bool waits_for_host(const std::string& name) {
    return name == "aten::_local_scalar_dense" || name == "aten::nonzero" || name == "aten::equal" ||
           name == "aten::masked_select" || name == "aten::_unique2" || name == "aten::unique_dim";
}

// Draws from the device's generator where a kernel draws from the CPU's without being given one.
class DrawnHere {
public:
    explicit DrawnHere(c10::DeviceIndex index)
        : cpu_(at::detail::getDefaultCPUGenerator()), ours_(drawing(default_generator(index))), lock_(cpu_.mutex()) {
        kept_ = cpu_.unsafeGetGeneratorImpl()->get_state();
        cpu_.unsafeGetGeneratorImpl()->set_state(*ours_.unsafeGetGeneratorImpl()->get_state());
        lock_.unlock();  // the kernel takes it
    }
    ~DrawnHere() {
        lock_.lock();
        ours_.unsafeGetGeneratorImpl()->set_state(*cpu_.unsafeGetGeneratorImpl()->get_state());
        cpu_.unsafeGetGeneratorImpl()->set_state(*kept_);
    }

private:
    at::Generator cpu_, ours_;
    std::unique_lock<std::mutex> lock_;
    c10::intrusive_ptr<c10::TensorImpl> kept_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t num_arguments = schema.arguments().size();
    const size_t first = stack->size() - num_arguments;
    OneDevice device(op);
    for (size_t i = first; i < stack->size(); ++i) {
        if ((*stack)[i].isDevice()) device.add((*stack)[i].toDevice());
        visit_tensors((*stack)[i], [&](const at::Tensor& tensor) { device.add(tensor); });
    }
    const c10::DeviceIndex index = device.check();
    if (waits_for_host(schema.name())) synchronizes(schema.name().c_str());
    if (!is_view(schema)) drain(current_stream(index));
    Aliases aliases;
    bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < num_arguments; ++i) {
        c10::IValue& value = (*stack)[first + i];
        if (value.isDevice() && value.toDevice().type() == kType) {
            value = c10::Device(c10::DeviceType::CPU);
        } else if (takes_generator(schema.arguments()[i])) {
            value = drawing(value.isNone() ? default_generator(index) : value.toGenerator());
            draws = false;
        } else {
            value = with_tensors(value, [&](const at::Tensor& tensor) { return aliases.of(tensor); });
        }
    }
    {
        BelowModes below;
        std::optional<DrawnHere> drawn;
        if (draws) drawn.emplace(index);
        op.redispatchBoxed(kCpu, stack);
    }
    aliases.update();
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
        (*stack)[i] = with_tensors((*stack)[i], [&](const at::Tensor& tensor) { return aliases.back(tensor, index); });
    }
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "lagomtest has strided tensors only");
    TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
    const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device())));
    return at::detail::empty_generic(size, device_allocator(), kDevice, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device())));
    return at::detail::empty_strided_generic(size, stride, device_allocator(), kDevice, c10::dtype_or_default(dtype));
}

// Zeros without memory, of forward-mode differentiation.
at::Tensor efficient_zeros(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>) {
    struct Nothing final : c10::Allocator {
        c10::DataPtr allocate(size_t) override { return {nullptr, c10::Device(kType, current_device())}; }
        void copy_data(void*, const void*, size_t) const override {}
    };
    static Nothing nothing;
    const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device())));
    const auto keys = kDevice | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
    return at::detail::empty_generic(size, &nothing, keys, c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor& set_storage_and_layout(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
    TORCH_CHECK(storage.device() == self.device(), "the storage is on ", storage.device(), ", not ", self.device());
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    if (stride.data() == nullptr) {
        impl->set_sizes_contiguous(size);
    } else {
        impl->set_sizes_and_strides(size, stride);
    }
    return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
    const auto size = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
    return set_storage_and_layout(self, std::move(storage), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage_and_layout(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void copy_now(const at::Tensor& to, const at::Tensor& from) {
    BelowModes below;
    Aliases aliases;
    at::Tensor target = aliases.of(to);
    at::_ops::copy_::redispatch(kCpu, target, aliases.of(from), false);
}

// A copy of memory that the program may change as soon as the call has returned.
at::Tensor staged(const at::Tensor& tensor) {
    at::Tensor copy(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
    copy_now(copy, tensor);
    return copy;
}

// A copy between the device and the host, or two devices; CUDA's rules say whether it is late.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
    const bool goes_up = is_ours(to);
    const at::Tensor& host = goes_up ? self : to;
    const c10::Stream stream = current_stream((goes_up ? to : self).device().index());
    const bool is_pinned_host = !is_ours(host) && is_pinned(host.storage().data());
    if (is_ours(self) && is_ours(to)) {
        drain(current_stream(self.device().index()));
    } else if (non_blocking && (goes_up || is_pinned_host)) {
        enqueue(stream, [to, from = is_pinned_host || !goes_up ? self : staged(self)] { copy_now(to, from); });
        return to;
    } else {
        synchronizes("a blocking copy");
    }
    drain(stream);
    copy_now(to, self);
    return to;
}

at::Tensor& copy_into(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
    copy_from(from, self, non_blocking);
    return self;
}

// Devices other than the CPU and CUDA get convolutions by these names.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    torch::jit::Stack stack;
    torch::jit::push(
        stack, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
    run_on_cpu(op, &stack);
    return stack.back().toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    const int64_t num_out = transposed ? weight.size(1) * groups : weight.size(0);
    torch::jit::Stack stack;
    torch::jit::push(
        stack, grad, input, weight, std::vector<int64_t>{num_out}, stride, padding, dilation, transposed, output_padding,
        groups, std::vector<bool>(mask.begin(), mask.end()));
    run_on_cpu(op, &stack);
    return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// A tensor of the CPU that sees a tensor's memory, whatever is late.
at::Tensor host_view(const at::Tensor& tensor) { return Aliases().of(tensor); }

TORCH_LIBRARY(lagomtest, library) { library.def("host_view(Tensor tensor) -> Tensor", &host_view); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Operations of the device's own, below.
const std::unordered_set<std::string> kOwn = {
    "aten::empty", "aten::empty_strided", "aten::_efficientzerotensor", "aten::set_", "aten::_copy_from", "aten::copy_",
    "aten::convolution_overrideable", "aten::convolution_backward_overrideable",
};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    // torch would compute these for any device by other operations, with other last digits than the CPU's.
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findOp(name);
        if (name.name.rfind("aten::", 0) == 0 && op && op->hasSchema() && kOwn.count(name.name) == 0 &&
            op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
            (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
             op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))) {
            const std::string text = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
            library.impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
        }
    }
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("_efficientzerotensor", &efficient_zeros);
    library.impl("set_.source_Storage", &set_storage);
    library.impl("set_.source_Storage_storage_offset", &set_storage_and_layout);
    library.impl("set_.source_Tensor", &set_tensor);
    library.impl("_copy_from", &copy_from);
    library.impl("copy_", &copy_into);
    library.impl("convolution_overrideable", &convolution);
    library.impl("convolution_backward_overrideable", &convolution_backward);
}

// torch.autocast: the operations that compute in the lower precision, or in float32.

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
