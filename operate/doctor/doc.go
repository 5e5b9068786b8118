// Package doctor explains why a volume does not work: it gathers evidence from Kubernetes, the
// rack and the node, walks from the claim to the mounts of the pod, and tells for the most telling
// broken link what is wrong, for how long, what will happen by itself, and what to do next. What
// the driver says outranks what is inferred (basis). It only reads.
//
// Gather collects the Evidence; what it cannot see, it says. Diagnose is a pure function of it.
//
// Files: question.go and options.go (what is asked), gather.go, gather_rack.go and gather_node.go
// (the evidence, evidence.go), sift.go (what of it may be shown, and whose pods are asked),
// chain.go (which objects belong together), said.go (the driver's errors that Kubernetes recorded),
// judge_cluster.go, judge_workload.go (node and pod), judge_rack.go and judge_node.go (the links),
// diagnosis.go (the result), advice.go (what follows from a reason), report.go, tree.go and
// bundle.go (the result for people, and for a support case).
package doctor
