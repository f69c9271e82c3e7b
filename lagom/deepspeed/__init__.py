"""DeepSpeed behind programs that know nothing of it; the only place that imports it."""
