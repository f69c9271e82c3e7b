// The tensors within an argument of an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace lagomtest {

template <class Visit>
void visit_tensors(const c10::IValue& value, Visit visit) {
    if (value.isTensor()) {
        visit(value.toTensor());
    } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
    } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
            if (tensor) visit(*tensor);
        }
    }
}

template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (at::Tensor& tensor : tensors) tensor = change(tensor);
        return c10::IValue(tensors);
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
            tensors.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
        }
        return tensors;
    }
    return value;
}

}  // namespace lagomtest
