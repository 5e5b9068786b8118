package keepertest

import (
	"fmt"
	"net/http"
	"slices"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"
)

// evict deletes a pod if its disruption budget allows it. It decides as
// pkg/registry/core/pod/storage/eviction.go of Kubernetes 1.35 does.
func (s *Server) evict(c call, old *stored) ([]byte, error) {
	var eviction policyv1.Eviction
	if err := decode(c.Body, &eviction); err != nil {
		return nil, err
	}
	if eviction.Name != c.Name {
		return nil, apierrors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	pod := old.object.(*corev1.Pod)
	// A budget does not count a pod that has ended, has not begun, or is being deleted.
	if !slices.Contains([]corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed,
		corev1.PodPending}, pod.Status.Phase) && pod.DeletionTimestamp == nil {
		if err := s.disrupt(pod); err != nil {
			return nil, err
		}
	}
	return s.delete(c, old, ptr.Deref(eviction.DeleteOptions, metav1.DeleteOptions{}))
}

// disrupt uses up one disruption that the pod's budget allows, or returns the error that refuses
// the eviction.
func (s *Server) disrupt(pod *corev1.Pod) error {
	var found []*stored
	for _, budget := range s.store.all(budgets, pod.Namespace) {
		selector, err := metav1.LabelSelectorAsSelector(
			budget.object.(*policyv1.PodDisruptionBudget).Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
			found = append(found, budget)
		}
	}
	if len(found) == 0 {
		return nil
	}
	if len(found) > 1 {
		return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure,
			Code: http.StatusInternalServerError, Message: "This pod has more than one " +
				"PodDisruptionBudget, which the eviction subresource does not support."}}
	}
	budget := found[0].copy().(*policyv1.PodDisruptionBudget)
	status := &budget.Status
	ready := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	policy := ptr.Deref(budget.Spec.UnhealthyPodEvictionPolicy, policyv1.IfHealthyBudget)
	if !ready && (policy == policyv1.AlwaysAllow ||
		status.CurrentHealthy >= status.DesiredHealthy && status.DesiredHealthy > 0) {
		return nil
	}
	if status.DisruptionsAllowed <= 0 {
		refusal := apierrors.NewTooManyRequests(
			"Cannot evict pod as it would violate the pod's disruption budget.", 0)
		refusal.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause,
			Message: fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently",
				budget.Name, status.DesiredHealthy, status.CurrentHealthy)}}
		return refusal
	}
	status.DisruptionsAllowed--
	if status.DisruptedPods == nil {
		status.DisruptedPods = map[string]metav1.Time{}
	}
	status.DisruptedPods[pod.Name] = metav1.NewTime(s.store.now())
	_, err := s.store.update(budgets, found[0], budget)
	return err
}
