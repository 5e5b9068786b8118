// Package model holds the proof that the node keeper, killed and hindered in every way, ends with
// every instance running and no node cordoned. Histories are drawn: two keepers, a cluster with
// attacher, kubelets and controllers that the proof plays, and a simulated rack without hot-plug,
// which may get it. Each history has a few kinds of disturbances, which happen at rest, in an
// operation, or between two requests of a round. After each act, and at each change that a keeper
// makes, the proof looks whether a promise is broken; in the end everything is mended, and
// everything has to come to rest. What people break they mend: an instance that they stopped, or
// whose record they changed.
package model
