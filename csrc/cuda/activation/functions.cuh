// The activations and their slopes, the same in every kernel. Products and sums are rounded one by
// one, so that no two kernels differ by a contracted multiplication and addition.
//
// The tanh of GELU is a sigmoid: 0.5 x (1 + tanh(u)) = x sigmoid(2 u). A sigmoid takes one
// approximate exponential and one approximate reciprocal, each within 2 units in the last place:
//
//     sigmoid(z) = 1 / (1 + 2^(-z log2(e)))
//
// It is 0 for z = -inf, 1 for inf, NaN for NaN. Where the exponential overflows, the sigmoid is 0.
#pragma once

#include <cstdint>

#include "fp8core/activation.h"

namespace fp8core {

// A function with its constants, as kernels take it.
struct FunctionParams {
  ActivationFunction function;
  float beta;           // of kSwish and kClampedSwish
  float rate;           // -beta log2(e)
  float limit, offset;  // kClampedSwish
};

FunctionParams function_params(const ActivationDesc& desc);

// f(x) and its derivative.
struct Curve {
  float value, slope;
};

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ inline float min_or_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 1 / (1 + 2^t)
__device__ inline float sigmoid_of_exponent(float t) {
  return reciprocal_approx(__fadd_rn(1.0f, exp2_approx(t)));
}

struct Swish {
  float beta, rate;

  __device__ explicit Swish(const FunctionParams& p) : beta(p.beta), rate(p.rate) {}
  __device__ float value(float x) const {
    return __fmul_rn(x, sigmoid_of_exponent(__fmul_rn(x, rate)));
  }
  // s + beta x s (1 - s), beta last: beta x may overflow, and inf * 0 is NaN.
  __device__ Curve curve(float x) const {
    const float s = sigmoid_of_exponent(__fmul_rn(x, rate)), y = __fmul_rn(x, s);
    return {y, __fmaf_rn(beta, __fmul_rn(y, __fadd_rn(1.0f, -s)), s)};
  }
};

struct Gelu {
  // 2 u = x (c0 + c1 x^2) with c0 = 2 sqrt(2 / pi), c1 = 0.044715 c0; times -log2(e) in a rate.
  static constexpr float kSlope0 = 1.5957691216057308f, kSlope1 = 3 * 0.07135481627260025f;
  static constexpr float kRate0 = -2.302208198144325f, kRate1 = -0.1029432395800235f;

  __device__ explicit Gelu(const FunctionParams&) {}
  // Finite, so that the slope is no 0 * inf where x^2 overflows; all results are constant by then.
  static __device__ float square(float x) { return fminf(__fmul_rn(x, x), 1e30f); }
  static __device__ float sigmoid(float x, float squared) {
    return sigmoid_of_exponent(__fmul_rn(x, __fmaf_rn(kRate1, squared, kRate0)));
  }
  // Of an infinite square the sigmoid is 0 or 1, as of a large one.
  __device__ float value(float x) const { return __fmul_rn(x, sigmoid(x, __fmul_rn(x, x))); }
  __device__ Curve curve(float x) const {  // s + x s (1 - s) (c0 + 3 c1 x^2)
    const float squared = square(x), s = sigmoid(x, squared), y = __fmul_rn(x, s);
    const float bend = __fmul_rn(y, __fadd_rn(1.0f, -s));
    return {y, __fmaf_rn(bend, __fmaf_rn(kSlope1, squared, kSlope0), s)};
  }
};

// x P(x), with the normal distribution function P = P(-|x|) or 1 - P(-|x|), where
//
//     P(-|x|) = exp(-x^2 / 2) t Q(t), t = 1 / (1 + 0.28 |x|)
//
// and Q is fitted for the least relative error, 1.8e-7 for any x; float32 adds 3e-7 where P is not
// tiny.
struct ErfGelu {
  __device__ explicit ErfGelu(const FunctionParams&) {}
  __device__ float value(float x) const { return curve(x).value; }
  __device__ Curve curve(float x) const {  // the slope is P(x) + x exp(-x^2 / 2) / sqrt(2 pi)
    const float density = exp2_approx(__fmul_rn(__fmul_rn(x, x), -0.7213475204444817f));
    const float t = reciprocal_approx(__fmaf_rn(0.28f, fabsf(x), 1.0f));
    float q = 0.024719959124922752f;
    q = __fmaf_rn(q, t, -0.093593068420887f);
    q = __fmaf_rn(q, t, 0.09242803603410721f);
    q = __fmaf_rn(q, t, -0.006449117790907621f);
    q = __fmaf_rn(q, t, 0.0727749839425087f);
    q = __fmaf_rn(q, t, 0.08363080024719238f);
    q = __fmaf_rn(q, t, 0.10308466106653214f);
    q = __fmaf_rn(q, t, 0.11169980466365814f);
    q = __fmaf_rn(q, t, 0.11170385777950287f);
    const float tail = __fmul_rn(__fmul_rn(t, q), density);
    const float p = x < 0.0f ? tail : __fadd_rn(1.0f, -tail);
    return {__fmul_rn(x, p), __fmaf_rn(__fmul_rn(x, 0.3989422804014327f), density, p)};
  }
};

struct Sigmoid {
  __device__ explicit Sigmoid(const FunctionParams&) {}
  __device__ float value(float x) const {
    return sigmoid_of_exponent(__fmul_rn(x, -1.4426950408889634f));
  }
  __device__ Curve curve(float x) const {
    const float s = value(x);
    return {s, __fmul_rn(s, __fadd_rn(1.0f, -s))};
  }
};

struct Relu {
  __device__ explicit Relu(const FunctionParams&) {}
  __device__ float value(float x) const { return max_or_nan(x, 0.0f); }
  __device__ Curve curve(float x) const { return {value(x), x > 0.0f ? 1.0f : 0.0f}; }
};

struct SquaredRelu {
  __device__ explicit SquaredRelu(const FunctionParams&) {}
  __device__ float value(float x) const {
    const float y = max_or_nan(x, 0.0f);
    return __fmul_rn(y, y);
  }
  __device__ Curve curve(float x) const {
    const float y = max_or_nan(x, 0.0f);
    return {__fmul_rn(y, y), __fmul_rn(2.0f, y)};
  }
};

// The slope of a clamped value is 0.
struct ClampedSwish {
  Swish swish;
  float limit, offset;

  __device__ explicit ClampedSwish(const FunctionParams& p)
      : swish(p), limit(p.limit), offset(p.offset) {}
  __device__ float value(float a) const { return swish.value(min_or_nan(a, limit)); }
  __device__ Curve curve(float a) const {
    const Curve c = swish.curve(min_or_nan(a, limit));
    return {c.value, __fmul_rn(c.slope, a <= limit ? 1.0f : 0.0f)};
  }
  __device__ float factor(float b) const {
    return __fadd_rn(min_or_nan(max_or_nan(b, -limit), limit), offset);
  }
  __device__ float slope_of_factor(float b) const {
    return b >= -limit && b <= limit ? 1.0f : 0.0f;
  }
};

// Which functions a kernel is compiled for: one of the two that most models use, the others by a
// switch for each row of elements, or all.
enum class Family { kSwish, kGelu, kOther, kAny };

__host__ __device__ constexpr Family family_of(ActivationFunction function) {
  return function == ActivationFunction::kSwish  ? Family::kSwish
         : function == ActivationFunction::kGelu ? Family::kGelu
                                                 : Family::kOther;
}

template <Family kFamily, typename Run>
__device__ void with_function(const FunctionParams& p, const Run& run) {
  if constexpr (kFamily == Family::kSwish) {
    run(Swish(p));
  } else if constexpr (kFamily == Family::kGelu) {
    run(Gelu(p));
  } else {
    if constexpr (kFamily == Family::kAny) {
      if (p.function == ActivationFunction::kSwish) return run(Swish(p));
      if (p.function == ActivationFunction::kGelu) return run(Gelu(p));
    }
    switch (p.function) {
      case ActivationFunction::kErfGelu: return run(ErfGelu(p));
      case ActivationFunction::kSigmoid: return run(Sigmoid(p));
      case ActivationFunction::kRelu: return run(Relu(p));
      case ActivationFunction::kSquaredRelu: return run(SquaredRelu(p));
      default: return run(ClampedSwish(p));
    }
  }
}

template <typename F>
constexpr bool is_clamped = false;
template <>
inline constexpr bool is_clamped<ClampedSwish> = true;

// y = f(x), value by value.
template <Family kFamily, int kCount>
__device__ void activate(const FunctionParams& p, const float (&x)[kCount], float (&y)[kCount]) {
  with_function<kFamily>(p, [&](const auto& f) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) y[j] = f.value(x[j]);
  });
}

// y = f(a) b
template <Family kFamily, int kCount>
__device__ void activate(const FunctionParams& p, const float (&a)[kCount],
                         const float (&b)[kCount], float (&y)[kCount]) {
  with_function<kFamily>(p, [&](const auto& f) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float factor = b[j];
      if constexpr (is_clamped<std::decay_t<decltype(f)>>) factor = f.factor(b[j]);
      y[j] = __fmul_rn(f.value(a[j]), factor);
    }
  });
}

// grad_x = grad f'(x)
template <Family kFamily, int kCount>
__device__ void differentiate(const FunctionParams& p, const float (&grad)[kCount],
                              const float (&x)[kCount], float (&grad_x)[kCount]) {
  with_function<kFamily>(p, [&](const auto& f) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) grad_x[j] = __fmul_rn(grad[j], f.curve(x[j]).slope);
  });
}

// grad_a = grad b f'(a), grad_b = grad f(a)
template <Family kFamily, int kCount>
__device__ void differentiate(const FunctionParams& p, const float (&grad)[kCount],
                              const float (&a)[kCount], const float (&b)[kCount],
                              float (&grad_a)[kCount], float (&grad_b)[kCount]) {
  with_function<kFamily>(p, [&](const auto& f) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const Curve c = f.curve(a[j]);
      float factor = b[j];
      if constexpr (is_clamped<std::decay_t<decltype(f)>>) factor = f.factor(b[j]);
      grad_a[j] = __fmul_rn(__fmul_rn(grad[j], factor), c.slope);
      grad_b[j] = __fmul_rn(grad[j], c.value);
      if constexpr (is_clamped<std::decay_t<decltype(f)>>)
        grad_b[j] = __fmul_rn(grad_b[j], f.slope_of_factor(b[j]));
    }
  });
}

}  // namespace fp8core
