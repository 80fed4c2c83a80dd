"""The stages in order. Read `compile.compile_imported` first: one line a stage.

compile      the stages, as one flat function
job          what one compilation is asked for, and what it gives
setting      the machine and the choices that it works with
recall       a plan that was chosen before
candidates   kernels that a plan may be made of, cut out as distinct `problems`
search       measuring on demand
plans        plans of what was measured; `choose` prices, solves and assembles, `qualify` has their calls verified
link         from plans to what can be called
answer       judged by the `reference`, timed (`finish`), explained where refused (`repro`), recorded, remembered
framework    the framework's own execution: a baseline, and the answer where no plan is left
deadline     the one clock that every stage keeps to; `stages` names, times and reports them
"""
